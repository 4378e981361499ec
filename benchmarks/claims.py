"""Reads ``claims.yaml``, which contains every figure that the project states, and the results that prove them."""

import importlib
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.source import ROOT
from megatron_ft.errors import ConfigError

CLAIMS_FILE = ROOT / "benchmarks" / "claims.yaml"
RESULTS_DIR = ROOT / "benchmarks" / "results"
VARIANTS = ("fast", "slow", "extended", "timed")
MAX_SHORT_CHARACTERS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Claim of the project: its statement, the command that measures it, and the bound that it must keep."""

    id: str
    short: str
    """The claim in at most 40 characters, for tables."""
    statement: str
    command: str
    quick: str
    """Variant of the command that takes seconds. It stores no result."""
    quick_is: str
    """Kind of the quick variant, which decides when the test suite runs it. In every run: ``fast`` (seconds) or
    ``slow``. Only in ``make test-all``: ``extended`` (another test checks the same in fewer jobs) or ``timed`` (judged
    by times, so it runs alone). ``make bench QUICK=1`` runs all quick variants."""
    threshold: str
    """Text of the bound. In a full measurement the script must report the same text."""
    hardware: tuple[str, ...]
    """Hardware classes on which the claim may be measured."""
    timeout_seconds: float
    quick_tries: int = 1
    """Number of attempts of the quick variant before a test fails. More than one is allowed only if the variant is
    judged by times, which a busy machine can only lengthen."""
    needs: str | None = None
    """File that the measurement needs and that the repository does not contain, as a path relative to the
    repository."""

    needs_machine: str | None = None
    """``module:function`` that returns what this machine lacks for the measurement, or None."""

    @property
    def missing(self) -> str | None:
        """Return what this machine lacks for the measurement; None if nothing is missing."""
        path = None if self.needs is None else (ROOT / self.needs).resolve()
        if path is not None and not path.exists():
            return f"there is no file {path}"
        if self.needs_machine is None:
            return None
        module, _, function = self.needs_machine.partition(":")
        lacking = getattr(importlib.import_module(module), function)()
        return None if lacking is None else str(lacking)

    def validate(self) -> None:
        """Raise a ConfigError if the claim cannot be run or does not fit into a table."""
        if not 0 < len(self.short) <= MAX_SHORT_CHARACTERS:
            raise ConfigError.of(f"{self.id}.short", self.short, f"must have 1 to {MAX_SHORT_CHARACTERS} characters")
        for key, command in (("command", self.command), ("quick", self.quick)):
            if shlex.split(command)[:2] != ["python", "-m"]:
                raise ConfigError.of(f"{self.id}.{key}", command, "must start with 'python -m'")
        if self.quick_is not in VARIANTS:
            raise ConfigError.of(f"{self.id}.quick_is", self.quick_is, f"must be one of {', '.join(VARIANTS)}")
        if self.quick_tries < 1:
            raise ConfigError.of(f"{self.id}.quick_tries", self.quick_tries, "must be at least 1")
        if not self.hardware:
            raise ConfigError.of(f"{self.id}.hardware", [], "must name at least one hardware class")

    def argv(self, *, quick: bool, out: Path) -> list[str]:
        """Return the command line, with this interpreter in place of ``python`` and with ``--out``."""
        words = shlex.split(self.quick if quick else self.command)
        return [sys.executable, *words[1:], "--out", str(out)]

    @property
    def module(self) -> str:
        """Return the Python module that measures the claim."""
        return shlex.split(self.command)[2]

    @property
    def script(self) -> str:
        """Return the path of the module's file relative to the repository."""
        return f"{self.module.replace('.', '/')}.py"


def load_claims(path: Path = CLAIMS_FILE) -> dict[str, Claim]:
    """Return all claims by id, in the file's order. Raises ConfigError for a malformed file."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    claims: dict[str, Claim] = {}
    for entry in entries["claims"]:
        claim = _claim(entry)
        if claim.id in claims:
            raise ConfigError.of("id", claim.id, "must be unique in claims.yaml")
        claims[claim.id] = claim
    return claims


def _claim(entry: dict[str, Any]) -> Claim:
    try:
        claim = Claim(**{**entry, "hardware": tuple(entry.get("hardware", ()))})
    except TypeError as error:
        raise ConfigError.of(
            "claims.yaml", entry.get("id"), f"must have exactly the fields of Claim ({error})"
        ) from error
    claim.validate()
    return claim


def newest_results(results_dir: Path = RESULTS_DIR) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the newest stored result of each (claim id, hardware class)."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted(results_dir.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        key = (result["id"], result["hardware"]["class"])
        if key not in newest or result["date"] >= newest[key]["date"]:
            newest[key] = result
    return newest
