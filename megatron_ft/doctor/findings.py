"""Findings: one sentence with an observation and one with its fix."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

LEVELS = ("error", "warning", "info")
"""``error`` breaks the job, ``warning`` may break it or slow it down, ``info`` is an observation
without a judgement."""
_INDENT = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check."""

    check: str
    """Name of the check."""
    level: str
    """One of ``LEVELS``."""
    what: str
    fix: str = ""
    """Suggested action; empty where none is needed."""

    def __post_init__(self) -> None:
        assert self.level in LEVELS, f"no level {self.level!r}"
        assert self.fix or self.level == "info", f"{self.what}: needs a fix"

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def error(check: str, what: str, fix: str) -> Finding:
    """Create a finding that breaks the job."""
    return Finding(check=check, level="error", what=what, fix=fix)


def warning(check: str, what: str, fix: str) -> Finding:
    """Create a finding that may break the job or slow it down."""
    return Finding(check=check, level="warning", what=what, fix=fix)


def info(check: str, what: str) -> Finding:
    """Create a finding without a judgement."""
    return Finding(check=check, level="info", what=what)


def exit_code(findings: Iterable[Finding], *, strict: bool) -> int:
    """Return 2 with errors, 1 with warnings if those count, 0 otherwise."""
    levels = {finding.level for finding in findings}
    if "error" in levels:
        return 2
    return 1 if strict and "warning" in levels else 0


def render(findings: Sequence[Finding]) -> str:
    """Render findings as text, the most severe first, and a line of totals."""
    lines = []
    for finding in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        lines.append(f"{finding.level:<9}{finding.check:<{_INDENT - 9}}{finding.what}")
        if finding.fix:
            lines.append(f"{'':<{_INDENT}}fix: {finding.fix}")
    counts = [sum(finding.level == level for finding in findings) for level in LEVELS]
    nouns = ("error", "warning", "fact")
    lines.append(", ".join(f"{n} {noun}{'' if n == 1 else 's'}" for n, noun in zip(counts, nouns, strict=True)))
    return "\n".join(lines)


def amount(num_bytes: int) -> str:
    """Format bytes in a readable unit, e.g. ``1.5 GiB``."""
    value, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{num_bytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
