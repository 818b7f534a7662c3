"""Reads a page strictly: every element is closed in its turn."""

from html.parser import HTMLParser


class Reader(HTMLParser):
    """Checks that every element is closed in its turn, and collects what there is."""

    VOID = ("meta", "img")

    def __init__(self):
        super().__init__()
        self.open, self.found = [], []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(page: str) -> list[tuple[str, dict]]:
    """Returns each element's tag and attributes, in order."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    return reader.found
