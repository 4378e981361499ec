"""Writes the tables of metrics and events in docs/telemetry.md from the code that defines them."""

import argparse
import ast
import inspect
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ft.events import RECORDS, Record, schema
from megatron_ft.telemetry.metrics import FROM_EVENTS, METRICS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "telemetry.md"
_BEGIN, _END = "<!-- generated: {name} -->", "<!-- end of {name} -->"


def field_meanings(kind: type[Record]) -> dict[str, str]:
    """Map the name of each field of a record class to the docstring below the field."""
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef), f"{kind} has no class source"
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in itertools.pairwise(node.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def metrics_table() -> str:
    """Return all metrics as a Markdown table."""
    places = (("`metrics.jsonl`, wandb", METRICS), ("wandb", FROM_EVENTS))
    rows = [
        f"| `{metric.name}` | {metric.unit} | {place} | {metric.meaning} |"
        for place, metrics in places
        for metric in metrics.values()
    ]
    return "\n".join(["| metric | unit | in | meaning |", "|---|---|---|---|", *rows])


def events_table() -> str:
    """Return all kinds of telemetry records (e.g. events) and their fields as a Markdown table."""
    lines = ["| record | field | type | meaning |", "|---|---|---|---|"]
    for kind, described in schema()["records"].items():
        lines.append(f"| **`{kind}`** | | | *{described['meaning']}* |")
        meanings = field_meanings(RECORDS[kind])
        for name, field in described["fields"].items():
            if name == "time_unix_seconds" or (kind, name) == ("metrics", "values"):
                continue
            optional = "" if field["required"] else ", optional"
            lines.append(f"| | `{name}` | {field['type']}{optional} | {meanings[name]} |")
    return "\n".join(lines)


def render(page: str) -> str:
    """Replace the generated tables in ``page``.

    Raises:
        ValueError: ``page`` has no marker line for the begin or end of a table.
    """
    for name, text in (("metrics", metrics_table()), ("events", events_table())):
        begin, end = _BEGIN.format(name=name), _END.format(name=name)
        head, _, rest = page.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"{PAGE.name}: must contain the marker lines of the table {name!r}")
        page = f"{head}{begin}\n{text}\n{end}{tail}"
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables into docs/telemetry.md. With ``--check``, only check this page. Return the exit code."""
    parser = argparse.ArgumentParser(prog="document_telemetry", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with code 1 if a table is out of date"
    )
    page = PAGE.read_text(encoding="utf-8")
    if parser.parse_args(arguments).check:
        if render(page) != page:
            print("docs/telemetry.md is out of date: run python -m tools.document_telemetry", file=sys.stderr)
        return int(render(page) != page)
    PAGE.write_text(render(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
