"""A terminal's screen as a page: all of its text, in its colours, and nothing of it as markup."""

from benchmarks.pictures import COLUMNS, screen_as_html


def test_text_and_colours_of_a_screen_are_on_its_page() -> None:
    line = "\x1b[38;2;213;94;0m\x1b[1mx rank 2 died\x1b[0m <b>plainly</b> " + "\u2500" * 40
    page = screen_as_html(f"{line}\n\n[bold]as it is[/bold]\n\n\n")
    assert "x rank 2 died" in page and "#d55e00" in page
    assert "&lt;b&gt;plainly&lt;/b&gt;" in page and "[bold]as it is[/bold]" in page
    assert page.count("\u2500") == 40 and page.rstrip().endswith("</pre>")
    assert screen_as_html("y" * COLUMNS).count("y" * COLUMNS) == 1, "a full line is not broken"
