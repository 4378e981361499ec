"""Alerts of a run: those that stand, and all that were raised and cleared."""

from collections.abc import Iterator

from megatron_ft.events import AlertCleared, AlertRaised
from megatron_ft.telemetry.report.markup import Element, element
from megatron_ft.telemetry.report.model import RunReport
from megatron_ft.telemetry.report.tables import table
from megatron_ft.telemetry.wording import note

MAX_ROWS = 100


def alerts(report: RunReport) -> Iterator[Element]:
    """What somebody should look at; nothing where no alert was ever raised."""
    if not report.alerts:
        return
    yield element("h2", "Alerts", id="alerts")
    newest = {record.alert: record for record in report.alerts}
    standing = [record for record in newest.values() if isinstance(record, AlertRaised)]
    if standing:
        yield element("ul", *(element("li", _words(record), class_="words bad") for record in standing[:MAX_ROWS]))
    else:
        yield element("p", "None stands any longer.", class_="good")
    shown = report.alerts[-MAX_ROWS:]
    more = len(report.alerts) - len(shown)
    caption = "As they came" + (f"; {more:,} earlier ones are left out" if more else "")
    rows = [(f"{record.iteration:,}", _words(record)) for record in shown]
    found = table(caption, ("iteration", "what"), rows, numbers={0}, words=1)
    yield element("details", element("summary", "All of them"), found)


def _words(record: AlertRaised | AlertCleared) -> str:
    told = note(record)
    assert told is not None, "every alert has words"
    return told.text
