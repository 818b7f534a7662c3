// What scrolls can be reached by the keyboard, and nothing else is a stop on the way.
const parts = "pre, .table-wrapper, .output.text_html";
function markScrolling() {
  for (const part of document.querySelectorAll(parts)) {
    if (part.scrollWidth > part.clientWidth || part.scrollHeight > part.clientHeight) part.tabIndex = 0;
    else part.removeAttribute("tabindex");
  }
}
addEventListener("load", markScrolling);
addEventListener("resize", markScrolling);
