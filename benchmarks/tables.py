"""Writes the tables of figures in README.md and docs/claims.md from the stored results, between two markers.

``python -m benchmarks.tables`` writes the tables; ``--check`` reports whether they are current.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.claims import RESULTS_DIR, Claim, load_claims, newest_results
from benchmarks.front_page import front_page_table
from benchmarks.source import ROOT, source_digest
from megatron_ft.errors import ConfigError

BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"
GIB = 1024**3
AS_SHIPPED = "as it is now"
OLDER = "older: files that the claim's script uses have changed since"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check all tables. Return 1 if ``--check`` finds a table that is not current, 2 for a malformed claim or
    page."""
    parser = argparse.ArgumentParser(prog="tables", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with code 1 if a table is not current"
    )
    check = parser.parse_args(argv).check
    try:
        stale = refresh(write=not check)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
    if check and stale:
        print(f"not current: {names}; run `make tables`", file=sys.stderr)
        return 1
    print(f"tables written: {names}" if stale else "tables are current")
    return 0


def refresh(*, write: bool) -> list[Path]:
    """Compare the pages with the results, and rewrite them if ``write``. Return the pages that were not current."""
    claims, results = load_claims(), newest_results(RESULTS_DIR)
    tables = {
        ROOT / "README.md": front_page_table(claims, results),
        ROOT / "docs" / "claims.md": f"{short_table(claims, results)}\n\n{full_table(claims, results)}",
    }
    return [path for path, table in tables.items() if update(path, table, write=write)]


def update(path: Path, table: str, *, write: bool) -> bool:
    """Compare the text between the markers with ``table``, and replace it if ``write``. Return whether it differed."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError.of(path.name, f"{text.count(BEGIN)} markers", f"must contain {BEGIN} and {END} exactly once")
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    wanted = f"{head}{BEGIN}\n{table}\n{END}{tail}"
    if write and wanted != text:
        path.write_text(wanted, encoding="utf-8")
    return wanted != text


def short_table(claims: dict[str, Claim], results: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return one row for each claim and each hardware class that has a result, with short cells."""
    rows = ["| claim | what | result | on | date |", "|---|---|---|---|---|"]
    for claim in claims.values():
        for result in _of(claim, results):
            verdict = "PASS" if result["passed"] else "**FAIL**"
            link = f"[`{claim.id}`](#{claim.id})"
            rows.append(_row(link, claim.short, verdict, result["hardware"]["class"], result["date"]))
    return "\n".join(rows)


def full_table(claims: dict[str, Claim], results: dict[tuple[str, str], dict[str, Any]], *, root: Path = ROOT) -> str:
    """Return one section for each claim: statement, bound, and for every hardware class its result with counts."""
    sections: list[str] = []
    for claim in claims.values():
        sections.append(f"### `{claim.id}`\n\n{claim.statement.strip()}\n\nBound: {claim.threshold}.")
        sections.append(f"Measured by `make prove ID={claim.id}` on {' or '.join(claim.hardware)}.")
        source = source_digest(root / claim.script, root=root)
        sections += [_measured(result, source) for result in _of(claim, results)] or ["Not measured yet."]
    return "\n\n".join(sections)


def _of(claim: Claim, results: dict[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    return [results[claim.id, name] for name in claim.hardware if (claim.id, name) in results]


def _measured(result: dict[str, Any], source: str) -> str:
    verdict = "PASS" if result["passed"] else "FAIL"
    counts = ", ".join(f"{name} {value}" for name, value in result["counts"].items()) or "none"
    rows = [
        "| | |",
        "|---|---|",
        _row("result", f"{verdict}: {result['figure']}"),
        _row("date", result["date"]),
        _row("counts", counts),
        _row("hardware", machine(result["hardware"])),
        _row("software", f"Python {result['hardware']['python']}, torch {result['hardware']['torch']}"),
        _row("took", f"{result['wall_seconds']:.0f} s"),
        _row("source", AS_SHIPPED if result.get("source") == source else OLDER),
    ]
    return "\n\n".join(["\n".join(rows), *map(_table, result["details"].get("tables", ()))])


def _table(table: dict[str, Any]) -> str:
    """Format a table that is part of a result and has ``title``, ``header`` and ``rows``."""
    header = table["header"]
    rows = [_row(*header), "|" + "---|" * len(header), *(_row(*row) for row in table["rows"])]
    return "\n".join([f"{table['title']}:", "", *rows])


def machine(facts: dict[str, Any]) -> str:
    """Describe a machine in one phrase: GPUs if any, cores, processor, memory."""
    gpus = f"{len(facts['gpus'])} x {facts['gpus'][0]}, " if facts["gpus"] else ""
    return f"{gpus}{facts['num_cores']} cores ({facts['cpu_model']}), {facts['memory_bytes'] / GIB:.0f} GiB"


def _row(*cells: str) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
