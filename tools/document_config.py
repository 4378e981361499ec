"""Writes docs/configuration.md: every key with its type, default and meaning, from the dataclasses' docstrings."""

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from megatron_ft.config.docs import KeyDoc, group_docs, key_docs
from megatron_ft.config.overrides import group_options

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

Generated from the docstrings in `megatron_ft/config/` by `python -m tools.document_config`; do not edit it by hand.

Choose a file of `conf/` with `group=option`, set a key with `group.key=value`, in Hydra's grammar. Units are in the
names. Unknown keys, values of another type and combinations that cannot run are refused before any rank starts;
`dry_run=true` checks everything and shows the plan.
"""


def page() -> str:
    """Return the whole page."""
    options, about = group_options(ROOT / "conf"), group_docs()
    sections = [INTRODUCTION]
    for group, docs in groupby(key_docs(), key=lambda doc: doc.key.rpartition(".")[0]):
        choices = ", ".join(f"`{group}={name}`" for name in options.get(group, []))
        heading = f"## {group}\n\n{about[group]} Files: {choices}.\n" if group else "## the job itself\n"
        sections.append(
            "\n".join([heading, "| key | type | default | meaning |", "|---|---|---|---|", *map(_row, docs)])
        )
    return "\n".join(sections) + "\n"


def _row(doc: KeyDoc) -> str:
    default = doc.default.replace("|", "\\|") or "''"
    meaning = doc.doc.replace("``", "`").replace("|", "\\|")
    return f"| `{doc.key}` | {doc.type} | `{default}` | {meaning} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or with ``--check`` report whether it is up to date; returns the exit code."""
    parser = argparse.ArgumentParser(prog="document_config", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    if parser.parse_args(arguments).check:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != page()
        if stale:
            print(f"{PAGE.relative_to(ROOT)} is out of date: run python -m tools.document_config", file=sys.stderr)
        return int(stale)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
