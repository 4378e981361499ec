"""``docs/telemetry.md``: its tables come from the code.

``python -m megatron_ft.telemetry.page`` writes the page anew.
"""

import ast
import inspect
import itertools
from pathlib import Path
from types import ModuleType

from megatron_ft import events, membership_events, snapshot_events
from megatron_ft.telemetry.metrics import FROM_EVENTS, METRICS

PAGE = Path(__file__).parents[2] / "docs" / "telemetry.md"
_BEGIN, _END = "<!-- generated: {name} -->", "<!-- end of {name} -->"


def field_meanings(module: ModuleType) -> dict[str, dict[str, str]]:
    """Class name to field name to the docstring below that field, for each class of ``module``."""
    meanings: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            meanings[node.name] = dict(_described(node.body))
    return meanings


def metrics_table() -> str:
    """All metrics as a Markdown table."""
    places = (("`metrics.jsonl`, wandb", METRICS), ("wandb", FROM_EVENTS))
    rows = [
        f"| `{metric.name}` | {metric.unit} | {place} | {metric.meaning} |"
        for place, metrics in places
        for metric in metrics.values()
    ]
    return "\n".join(["| metric | unit | in | meaning |", "|---|---|---|---|", *rows])


def events_table() -> str:
    """All records and their fields as Markdown."""
    modules = (events, membership_events, snapshot_events)
    meanings = {name: fields for module in modules for name, fields in field_meanings(module).items()}
    lines = ["| record | field | type | meaning |", "|---|---|---|---|"]
    for kind, described in events.schema()["records"].items():
        lines.append(f"| **`{kind}`** | | | *{described['meaning']}* |")
        for name, field in described["fields"].items():
            if name == "time_unix_seconds" or (kind, name) == ("metrics", "values"):
                continue
            optional = "" if field["required"] else ", optional"
            lines.append(
                f"| | `{name}` | {field['type']}{optional} | {meanings[events.RECORDS[kind].__name__][name]} |"
            )
    return "\n".join(lines)


def render(page: str) -> str:
    """``page`` with its generated parts made anew.

    Raises:
        ValueError: a marker is missing.
    """
    for name, text in (("metrics", metrics_table()), ("events", events_table())):
        begin, end = _BEGIN.format(name=name), _END.format(name=name)
        head, _, rest = page.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"{PAGE.name}: markers of {name!r} must be there")
        page = f"{head}{begin}\n{text}\n{end}{tail}"
    return page


def _described(body: list[ast.stmt]) -> list[tuple[str, str]]:
    pairs = itertools.pairwise(body)
    return [
        (field.target.id, " ".join(str(text.value.value).split()))
        for field, text in pairs
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    ]


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
