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

// The theme opens its menus by labels of hidden boxes, which the keyboard does not reach.
addEventListener("DOMContentLoaded", () => {
  for (const label of document.querySelectorAll("label.nav-overlay-icon, label.toc-overlay-icon")) {
    const box = document.getElementById(label.htmlFor), button = document.createElement("button");
    button.type = "button";
    button.className = label.className;
    button.append(...label.childNodes);
    button.setAttribute("aria-label", box.getAttribute("aria-label"));
    button.addEventListener("click", () => { box.checked = !box.checked; });
    label.replaceWith(button);
  }
});
