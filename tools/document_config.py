"""Writes docs/configuration.md from the docstrings of the configuration's dataclasses: every key with its type, default
and meaning. Also writes the table in docs/recovery.md from the requirements of the recovery strategies, and the table
in docs/from-megatron-lm.md from the answers to Megatron-LM's flags."""

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from megatron_ft.config.docs import KeyDoc, group_docs, key_docs
from megatron_ft.config.megatron_lm import Flag, flags
from megatron_ft.config.overrides import group_options
from megatron_ft.config.requirements import REQUIREMENTS, Requirement

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
RECOVERY_PAGE = ROOT / "docs" / "recovery.md"
MEGATRON_PAGE = ROOT / "docs" / "from-megatron-lm.md"
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
"""Requirements of earlier versions on configuration values, as text, by recovery strategy, then by key."""

INTRODUCTION = """\
# Configuration

Generated from the docstrings in `megatron_ft/config/` by `python -m tools.document_config`; do not edit it by hand.

Choose a file of `conf/` with `group=option`, set a key with `group.key=value`, in Hydra's grammar. Units are in the
names. Unknown keys, values of another type and combinations that cannot run are refused before any rank starts. All
independent errors of a command are listed at once, root causes first. `dry_run=true` checks everything and shows the
plan.

Hydra's options work as in every Hydra program, in about a second and without torch:

* `--cfg job`, `--cfg hydra` and `--cfg all` print the composed configuration; `--resolve` replaces interpolations,
  `--package` selects a part. `--info defaults`, `--info searchpath` and others show how it was composed.
  `--hydra-help` lists all options.
* `--config-dir DIR` adds a folder with groups, so that your own experiments and models need not be in the clone:
  `DIR/experiment/mine.yaml` is `experiment=mine`. `--config-name FILE` chooses another primary file; its defaults
  begin with `- config`. `--config-path` replaces `conf/`.
* `--multirun` (`-m`) runs one job for each combination of values: `optimizer.lr=1e-3,1e-4`, `range(1,4)`, `glob(*)`,
  or `hydra.sweeper.params` in a file. The jobs run one after the other, each is a run of its own (`run.name-0`,
  `run.name-1`, ...), and one table is printed at the end. All configurations are checked before the first job starts.
* `eval "$(python pretrain_moe.py --shell-completion install=bash)"` completes groups, options and keys (also zsh and
  fish).
* `hydra.*` keys are Hydra's own. Those that would have no effect are refused, for example `hydra.run.dir`: a run's
  folder is `run.dir` and `run.name`.

```sh
python pretrain_moe.py --cfg job --package optimizer optimizer.lr=3e-4
python pretrain_moe.py --info defaults model=mixtral_8x7b
python pretrain_moe.py --multirun dry_run=true model=moe_micro optimizer.lr=1e-3,1e-4
```
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
    """Return the text of docs/recovery.md, with a new table of the requirements of the recovery strategies."""
    rows = ["| strategy | key | before | now | what is missing otherwise |", "|---|---|---|---|---|"]
    for name, requirements in REQUIREMENTS.items():
        now = {requirement.key: requirement for requirement in requirements}
        before = _REQUIRED_BEFORE.get(name, {})
        rows += [_requirement_row(name, key, before.get(key), now.get(key)) for key in dict.fromkeys([*now, *before])]
    return _with_rows(RECOVERY_PAGE, "requirements", rows)


def _with_rows(path: Path, name: str, rows: Sequence[str]) -> str:
    """Return the text of the page ``path`` with ``rows`` between ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    first, last = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, begin, rest = path.read_text(encoding="utf-8").partition(first)
    _, end, tail = rest.partition(last)
    assert begin and end, f"{path.name} must contain {first} and {last}"
    return "\n".join([head + begin, *rows, end + tail])


def megatron_page() -> str:
    """Return the text of docs/from-megatron-lm.md, with a new table of Megatron-LM's flags and their replacements."""
    rows: list[str] = []
    for section, of_section in groupby(flags().values(), key=lambda flag: flag.section):
        rows += ["", f"### {section}", "", "| Megatron-LM | here |", "|---|---|"]
        # Consecutive flags that have no key, for the same reason, share a row. Other flags have rows of their own.
        for shared, alike in groupby(of_section, key=_shared):
            group = list(alike)
            rows += [_flag_row(group)] if shared else [_flag_row([flag]) for flag in group]
    return _with_rows(MEGATRON_PAGE, "flags", [*rows, ""])


def _shared(flag: Flag) -> str:
    return f"{flag.answer} {flag.note}" if flag.answer.split()[0] in ("none", "always") else ""


def _flag_row(alike: Sequence[Flag]) -> str:
    flag, names = alike[0], ", ".join(f"`--{flag.name}`" for flag in alike)
    head, _, accepted = flag.answer.partition(" ")
    if head == "none":
        answer = f"none: {flag.note}"
    elif head == "always":
        answer = f"always {f'`{accepted}`' if accepted else 'so'}: {flag.note}"
    elif head == "special":
        answer = flag.note
    elif accepted.startswith("in "):
        answer = f"`{head}` ({', '.join(f'`{value}`' for value in accepted.split()[1:])}); {flag.note}"
    else:
        answer = " ".join(f"`{key.removesuffix('=*')}`" for key in flag.answer.split())
        answer += f"; {flag.note}" if flag.note else ""
    return f"| {names} | {answer} |"


def _requirement_row(strategy: str, key: str, before: str | None, now: Requirement | None) -> str:
    cells = (before or "any value", now.demand if now else "any value", now.reason if now else "")
    return f"| `{strategy}` | `{key}` | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the generated pages. With ``--check``, write nothing, and return exit code 1 if a page is out of date."""
    parser = argparse.ArgumentParser(prog="document_config", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a page is out of date")
    pages = {PAGE: page(), RECOVERY_PAGE: recovery_page(), MEGATRON_PAGE: megatron_page()}
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
