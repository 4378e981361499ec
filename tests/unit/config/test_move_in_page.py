"""Tests that the page for users of Megatron-LM names only existing keys and options."""

import re
from pathlib import Path

from megatron_ft.config.overrides import _known_keys, group_options

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "from-megatron-lm.md").read_text(encoding="utf-8")


def test_every_key_it_names_exists() -> None:
    groups = group_options(ROOT / "conf")
    named = set(re.findall(rf"\b((?:{'|'.join(groups)})\.[a-z_0-9]+)\b", PAGE))
    assert len(named) > 80
    assert sorted(named - _known_keys().keys()) == []


def test_every_option_it_names_exists() -> None:
    groups = group_options(ROOT / "conf")
    chosen = re.findall(rf"\b({'|'.join(groups)})=([a-z_0-9]+)", PAGE)
    assert [pair for pair in chosen if pair[1] not in groups[pair[0]]] == []


def test_flags_are_listed_once() -> None:
    flags = re.findall(r"^\| `(--[a-z0-9-]+)` \|", PAGE, re.MULTILINE)
    assert len(flags) >= 75 and len(set(flags)) == len(flags)
