"""Text from a run's files cannot become anything but text."""

import pytest

from megatron_ft.telemetry.report.markup import element


def test_text_and_attributes_are_escaped() -> None:
    found = element("p", "<b>&\"'", title="\"><script>'&").render()
    assert found == '<p title="&quot;&gt;&lt;script&gt;&#x27;&amp;">&lt;b&gt;&amp;"\'</p>'


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\ud800", "\u202e", "\u2066", "\uffff"])
def test_what_a_page_cannot_hold_or_what_turns_text_around_is_replaced(character: str) -> None:
    found = element("p", f"a{character}b", title=character).render()
    assert found == '<p title="\ufffd">a\ufffdb</p>'
    found.encode("utf-8")


def test_names_of_attributes_and_what_is_left_out() -> None:
    found = element("a", None, "x", class_="wide", aria_label=None, x1=1.0, y1=2.345, href="#a")
    assert found.render() == '<a class="wide" x1="1" y1="2.35" href="#a">x</a>'
    assert element("meta", charset="utf-8").render() == '<meta charset="utf-8"/>'
