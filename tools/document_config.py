"""Writes docs/configuration.md from the docstrings of the configuration's dataclasses: every key with its type, default
and meaning. Also writes the table of docs/recovery.md from the requirements of the recovery strategies."""

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from megatron_ft.config.docs import KeyDoc, group_docs, key_docs
from megatron_ft.config.overrides import group_options
from megatron_ft.config.requirements import REQUIREMENTS, Requirement

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
RECOVERY_PAGE = ROOT / "docs" / "recovery.md"
_BEGIN, _END = "<!-- requirements:begin -->", "<!-- requirements:end -->"
_REQUIRED_BEFORE = {
    "living_state": {
        "launch.mode": "must be local",
        "launch.master_port": "must be 0",
        "parallel.pipeline_model_parallel_size": "must be 1",
        "parallel.tensor_model_parallel_size": "must be 1",
        "parallel.context_parallel_size": "must be 1",
        "parallel.use_distributed_optimizer": "must be false",
        "placement.schedule": "must be []",
        "placement.state_copies": "must be null",
        "placement.algorithm": "must be given",
        "training.device": "must be cpu",
    },
    "localized_replay": {
        "launch.mode": "must be local",
        "launch.master_port": "must be 0",
        "nodes.max_nodes": "must be null",
        "placement.algorithm": "must be null",
        "snapshot.policy": "must be given",
        "training.device": "must be cpu",
    },
    "rollback": {"snapshot.policy": "must be given"},
}
"""Former requirements of each recovery strategy, by key: those before strategies could be used with all layouts."""

INTRODUCTION = """\
# Configuration

Generated from the docstrings in `megatron_ft/config/` by `python -m tools.document_config`; do not edit it by hand.

Choose a file of `conf/` with `group=option`, set a key with `group.key=value`, in Hydra's grammar. Units are in the
names. Unknown keys, values of another type and combinations that cannot run are refused before any rank starts;
`dry_run=true` checks everything and shows the plan.
"""


def page() -> str:
    """Return the text of docs/configuration.md."""
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


def recovery_page() -> str:
    """Return the text of docs/recovery.md with the present requirements of the recovery strategies."""
    head, begin, rest = RECOVERY_PAGE.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, tail = rest.partition(_END)
    assert begin and end, f"{RECOVERY_PAGE.name} must contain {_BEGIN} and {_END}"
    rows = ["| strategy | key | before | now | what is missing otherwise |", "|---|---|---|---|---|"]
    for name, requirements in REQUIREMENTS.items():
        now = {requirement.key: requirement for requirement in requirements}
        before = _REQUIRED_BEFORE.get(name, {})
        rows += [_requirement_row(name, key, before.get(key), now.get(key)) for key in dict.fromkeys([*now, *before])]
    return "\n".join([head + begin, *rows, end + tail])


def _requirement_row(strategy: str, key: str, before: str | None, now: Requirement | None) -> str:
    cells = (before or "any value", now.demand if now else "any value", now.reason if now else "")
    return f"| `{strategy}` | `{key}` | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages. With ``--check``, only compare them with the files. Return the exit code."""
    parser = argparse.ArgumentParser(prog="document_config", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a page is out of date")
    pages = {PAGE: page(), RECOVERY_PAGE: recovery_page()}
    if parser.parse_args(arguments).check:
        stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run python -m tools.document_config", file=sys.stderr)
        return int(bool(stale))
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
