"""Looks whether each link of finished pages leads somewhere: to a file that is there, and to an anchor in it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINKS = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src", "iframe": "src", "object": "data"}


class _Page(HTMLParser):
    """The links of a page, and the anchors in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Keeps what a tag names, and what it points to."""
        found = dict(attributes)
        self.anchors |= {found.get("id") or "", (found.get("name") if tag == "a" else None) or ""}
        if (link := found.get(LINKS.get(tag, ""))) is not None:
            self.links.append((tag, link))


def find_broken(folder: Path) -> list[str]:
    """Returns each broken link, as "page: link"; and what a page loads from other servers, since all files are here.

    Links to other sites (``https:``, ``mailto:``) are not followed.
    """
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        for tag, link in page.links:
            parts, name = urlsplit(link), path.relative_to(folder)
            if parts.scheme in ("https", "http", "mailto") and tag == "a":
                continue
            if parts.scheme == "data":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            outside = parts.scheme or parts.netloc or not target.is_relative_to(folder.resolve())
            known = pages.get(target) if target.suffix == ".html" else None
            if outside or not target.is_file() or (known and unquote(parts.fragment) not in known.anchors):
                broken.append(f"{name}: {link}")
    return broken
