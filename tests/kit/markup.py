"""The structure of a page: its tags and the names of their attributes, without any text.

Text of users changes the text of a page and never its structure. So a page with hostile texts has the
same structure as the page with harmless ones.
"""

from html.parser import HTMLParser

VOID = frozenset(
    {"meta", "link", "input", "br", "hr", "img", "polyline", "path", "line", "rect", "circle"}
)
ADDRESSES = frozenset({"href", "src", "action", "formaction", "xlink:href", "data", "poster"})


class _Structure(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(" ".join((tag, *(name for name, _ in attrs))))
        for name, value in attrs:
            assert not name.startswith("on"), f"<{tag}> has code in {name}"
            assert name != "style", f"<{tag}> has a style"
            if name in ADDRESSES:
                assert is_safe(value or ""), f"<{tag} {name}> leads to {(value or '')[:100]!r}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()
        self.found.append(f"/{tag}")

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data[:100]!r}")


def is_safe(address: str) -> bool:
    """Whether an address is a path of this server, or one of another server that may only be opened."""
    is_here = address.startswith(("/", "#", "?")) and not address.startswith(("//", "/\\"))
    return is_here or address.startswith("https://")


def structure(text: str) -> tuple[str, ...]:
    """The tags of a page in order. Raises AssertionError when a tag is not closed, or when one has code,
    a style, or an address that is not safe."""
    parser = _Structure()
    parser.feed(text)
    parser.close()
    assert not parser.open, f"not closed: {parser.open}"
    return tuple(parser.found)
