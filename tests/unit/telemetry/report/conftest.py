"""Provides made-up runs, and parsers of their pages."""

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron_ft.testing.made_up_runs import MadeUpRun, elastic, localized, restarted

NO_TIMELINE = "No timeline"


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    return MadeUpRun(tmp_path / "trial-001")


@pytest.fixture(params=[localized, elastic, restarted], ids=lambda make: make.__name__)
def reported(request: pytest.FixtureRequest, run: MadeUpRun) -> MadeUpRun:
    """Return a run of each kind."""
    make: Callable[[MadeUpRun], None] = request.param
    make(run)
    return run


class Parts(HTMLParser):
    """Collects the parts of a page with an HTML parser. Elements that are not closed in order are an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == [], "elements that were never closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, f"</{tag}> closes another element"


def drawings(page: str) -> list[ElementTree.Element]:
    """Return the page's drawings that have a title, by an XML parser."""
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    return [drawing for drawing in root.iter("svg") if drawing.find("title") is not None]


def titles(page: str) -> list[str]:
    """Return the titles of the page's drawings in order."""
    return [str(drawing.findtext("title")) for drawing in drawings(page)]


def drawing_of(page: str, title: str) -> ElementTree.Element:
    """Return the only drawing whose title begins with this text."""
    (found,) = (drawing for drawing in drawings(page) if str(drawing.findtext("title")).startswith(title))
    return found
