"""Text of ``--help``."""

import textwrap
from pathlib import Path

from megatron_ft.config.docs import KeyDoc, group_docs, key_docs
from megatron_ft.config.overrides import group_options
from megatron_ft.errors import EXIT_CODES

WIDTH = 110

USAGE = """\
Pretrain a mixture-of-experts model on Megatron-Core, on CPUs or GPUs.

usage: python pretrain_moe.py [group=option ...] [key=value ...]

examples:
  python pretrain_moe.py                                           train the small default model
  python pretrain_moe.py dry_run=true model=mixtral_8x7b           print the plan, start nothing
  python pretrain_moe.py launch.ranks_per_node=2 parallel=ep2      two ranks, experts split over both
  python pretrain_moe.py training.train_iterations=200 run.name=a  a longer run with a name
  python pretrain_moe.py run.name=a run.resume=must                resume that run with its configuration
  python pretrain_moe.py experiment=fault_campaign \\
      'testing.failpoints=["kill(rank=1,at_iteration=7,phase=\\"backward\\")"]'
  python pretrain_moe.py --multirun optimizer.lr=1e-3,3e-4         two runs, one table at the end
  torchrun --nproc-per-node 2 pretrain_moe.py parallel=ep2         two ranks that torchrun starts

options: --help, --version, and Hydra's own: --cfg job|hydra|all [--resolve] [--package KEY], --info [defaults|...],
  --multirun (one run for each value of key=a,b), --config-dir DIR, --config-name FILE, --config-path DIR,
  --shell-completion install=bash|zsh|fish; --hydra-help describes them.
Overrides follow Hydra's grammar: quote lists and special characters."""


def help_text(conf: Path) -> str:
    """Return the text of ``--help``: usage, groups with options (folders and files of ``conf``), keys, exit codes."""
    return "\n\n".join([USAGE, _groups(conf), _keys(), _exit_codes()])


def _groups(conf: Path) -> str:
    options, docs = group_options(conf), group_docs()
    lines = ["groups (group=option; files in conf/):"]
    for group, names in options.items():
        lines.append(f"  {group}: {', '.join(names)}")
        if group in docs:
            lines.append(f"      {docs[group]}")
    return "\n".join(lines)


def _keys() -> str:
    return "\n".join(["keys (type, default):", *(line for doc in key_docs() for line in _key(doc))])


def _key(doc: KeyDoc) -> list[str]:
    text = doc.doc.replace("``", "")
    return [
        f"  {doc.key} ({doc.type}, {doc.default or repr('')})",
        *textwrap.wrap(text, WIDTH, initial_indent="      ", subsequent_indent="      "),
    ]


def _exit_codes() -> str:
    return "\n".join(["exit codes:", *(f"  {code:>3}  {meaning}" for code, meaning in EXIT_CODES.items())])
