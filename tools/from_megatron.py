"""Translates a command line of Megatron-LM. For every flag, prints the overrides that replace it, or the reason why
there are none.

python -m tools.from_megatron -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 12 --bf16
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ft.config.megatron_lm import Answer, Translation, translate
from megatron_ft.errors import EXIT_OK, ConfigError, MegatronFtError

_MEANINGS = {
    "key": "translated",
    "always": "every job behaves like this, nothing to set",
    "none": "no counterpart",
    "refused": "not correct flags",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return 2 if a flag is not one of Megatron-LM. Otherwise return 0, or with ``--dry-run`` the
    exit code of the dry run."""
    parser = argparse.ArgumentParser(prog="from_megatron", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--format", choices=("table", "command", "yaml", "json"), default="table", help="what to print")
    parser.add_argument("--yaml", type=Path, metavar="FILE", help="also write an experiment file for conf/experiment")
    parser.add_argument("--dry-run", action="store_true", help="run the translated command with dry_run=true")
    parser.add_argument("words", nargs="+", metavar="-- WORDS", help="the command line, after --")
    own, separator, words = _divided(sys.argv[1:] if arguments is None else list(arguments))
    options = parser.parse_args([*own, *(["--", *words] if separator else words)])
    translation = translate(options.words)
    try:
        if options.yaml is not None:
            _write(options.yaml, yaml_text(translation))
    except MegatronFtError as error:
        print(f"from_megatron: {error}", file=sys.stderr)
        return error.exit_code
    print(_FORMATS[options.format](translation))
    if translation.with_kind("refused"):
        return ConfigError.exit_code
    if options.dry_run:
        import pretrain_moe

        return pretrain_moe.main([*translation.overrides, "dry_run=true"])
    return EXIT_OK


def _divided(arguments: list[str]) -> tuple[list[str], bool, list[str]]:
    """Split ``arguments`` at ``--``. Return the words before it, whether there is a ``--``, and the words after it."""
    if "--" not in arguments:
        return arguments, False, []
    at = arguments.index("--")
    return arguments[:at], True, arguments[at + 1 :]


def _write(path: Path, text: str) -> None:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"--yaml={path}: must be a new file in a folder that exists: {error.strerror}") from None


def table(translation: Translation) -> str:
    """Return the translation as text: the translation of each flag, then the command that starts the job."""
    lines = []
    for kind, meaning in _MEANINGS.items():
        answers = translation.with_kind(kind)
        if answers:
            lines += [f"{meaning} ({len(answers)})", *(f"  {_line(answer)}" for answer in answers), ""]
    if translation.defaults:
        about = f"defaults of Megatron-LM that differ from the defaults here ({len(translation.defaults)})"
        lines += [about, *(f"  {_line(answer)}" for answer in translation.defaults), ""]
    return "\n".join([*lines, "command", f"  {command(translation)}"])


def _line(answer: Answer) -> str:
    overrides = f"  ->  {' '.join(answer.overrides)}" if answer.overrides else ""
    note = f"  ({answer.note})" if answer.overrides and answer.note else f"  {answer.note}" if answer.note else ""
    return f"{answer.given}{overrides}{note}"


def command(translation: Translation) -> str:
    """Return the command that starts the translated job."""
    starts_ranks = "launch=torchrun" in translation.overrides
    program = [*translation.launcher] if starts_ranks else ["python"]
    return shlex.join([*program, "pretrain_moe.py", *translation.overrides])


def yaml_text(translation: Translation) -> str:
    """Return an experiment file with the translated overrides."""
    import yaml
    from hydra.core.override_parser.overrides_parser import OverridesParser

    groups: list[str] = []
    values: dict[str, dict[str, object]] = {}
    for override in OverridesParser.create().parse_overrides(translation.overrides):
        group, _, name = override.key_or_group.partition(".")
        if name:
            values.setdefault(group, {})[name] = override.value()
        else:
            groups.append(f"  - override /{group}: {override.value()}")
    head = ["# @package _global_", "# Translated from a command line of Megatron-LM."]
    defaults = ["defaults:", *groups, ""] if groups else []
    return "\n".join([*head, *defaults, yaml.safe_dump(values, sort_keys=False)])


def _json(translation: Translation) -> str:
    return json.dumps({**asdict(translation), "overrides": translation.overrides}, indent=2)


_FORMATS = {"table": table, "command": command, "yaml": yaml_text, "json": _json}


if __name__ == "__main__":
    sys.exit(main())
