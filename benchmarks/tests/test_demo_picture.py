"""The README's demo as SVG: the terminal's whole text in its colours, and nothing of it as markup."""

from xml.etree import ElementTree

from benchmarks.demo_picture import COLUMNS, PICTURE, draw

SPACE = "\u00a0"


def texts(svg: str) -> str:
    """All text of a picture, lines without breaks, spaces as spaces."""
    return "".join(ElementTree.fromstring(svg).itertext()).replace(SPACE, " ")


def test_text_and_colours_of_a_terminal_are_in_its_picture() -> None:
    line = "\x1b[38;2;213;94;0m\x1b[1mx rank 2 died\x1b[0m <b>plainly</b> " + "\u2500" * 40
    svg = draw(f"{line}\n\n[bold]as it is[/bold]\n")
    text = texts(svg)
    assert "x rank 2 died" in text and "#d55e00" in svg
    assert "<b>plainly</b>" in text and "[bold]as it is[/bold]" in text and text.count("\u2500") == 40
    assert "y" * COLUMNS in texts(draw("y" * COLUMNS)), "a full line is not broken"
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", ""), "a picture fetches nothing"


def test_the_picture_in_the_readme_shows_the_kill_and_the_return() -> None:
    text = texts(PICTURE.read_text(encoding="utf-8"))
    assert "$ python pretrain_moe.py experiment=survive_a_kill" in text and "$ kill -9 " in text
    assert "3 ranks on nodes [0, 1, 3] continue after iteration" in text and "[2] of them joining" in text
