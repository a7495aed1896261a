"""HTML as a browser finds it: what the tests of views read their pages with."""

from __future__ import annotations

from html.parser import HTMLParser

_WITHOUT_END = ("br", "img", "wbr")


class Page(HTMLParser):
    """The tags, attributes and text of a page. Fails for what is closed twice, and for comments,
    declarations and instructions; `unclosed` are the tags that are never closed.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.unclosed: list[str] = []
        self.feed(page)
        self.close()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def values(self, name: str) -> list[str | None]:
        """Of every attribute of that name."""
        return [value for attribute, value in self.attributes if attribute == name]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in _WITHOUT_END:
            self.unclosed.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.unclosed.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.unclosed[-1:] != ["style"]:
            self.texts.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_decl(self, decl: str) -> None:
        raise AssertionError(f"a declaration: {decl}")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"an instruction: {data}")


def whole_page(page: str) -> Page:
    """The page, in which every tag is closed."""
    read = Page(page)
    assert read.unclosed == []
    return read
