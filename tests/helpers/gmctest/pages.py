"""HTML as a parser reads it."""

from html.parser import HTMLParser

NASTY = "<script>alert('x & \"y\"')</script> $title ${title}"
VOID = {"meta", "link", "img", "source", "br"}


class Balance(HTMLParser):
    """Raises where a tag is closed that was not open; ``open`` is empty at the end of a sound page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
