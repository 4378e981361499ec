"""What is found: one sentence that says what is so, and one that says what to do about it."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

LEVELS = ("error", "warning", "told")
"""``error`` breaks the job, ``warning`` may break it or slow it down, ``told`` is a fact that nobody judges."""
_INDENT = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check has to say."""

    check: str
    """What was looked at, in a word."""
    level: str
    """One of ``LEVELS``."""
    what: str
    mend: str = ""
    """What to do; empty where nothing needs doing."""

    def __post_init__(self) -> None:
        assert self.level in LEVELS, f"no level {self.level!r}"
        assert self.mend or self.level == "told", f"{self.what}: is judged, but has no mend"

    def to_json(self) -> dict[str, str]:
        """Plain values."""
        return asdict(self)


def error(check: str, what: str, mend: str) -> Finding:
    """Something that would break the job."""
    return Finding(check=check, level="error", what=what, mend=mend)


def warning(check: str, what: str, mend: str) -> Finding:
    """Something that may break the job, or slow it down."""
    return Finding(check=check, level="warning", what=what, mend=mend)


def told(check: str, what: str) -> Finding:
    """A fact."""
    return Finding(check=check, level="told", what=what)


def exit_code(findings: Iterable[Finding], *, strict: bool) -> int:
    """0: nothing that would break the job; 1: warnings, where they are asked to count; 2: errors."""
    levels = {finding.level for finding in findings}
    if "error" in levels:
        return 2
    return 1 if strict and "warning" in levels else 0


def render(findings: Sequence[Finding]) -> str:
    """Text for people, the worst first, and a line that counts."""
    lines = []
    for finding in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        lines.append(f"{finding.level:<9}{finding.check:<{_INDENT - 9}}{finding.what}")
        if finding.mend:
            lines.append(f"{'':<{_INDENT}}mend: {finding.mend}")
    counts = [sum(finding.level == level for finding in findings) for level in LEVELS]
    nouns = ("error", "warning", "fact")
    lines.append(", ".join(f"{n} {noun}{'' if n == 1 else 's'}" for n, noun in zip(counts, nouns, strict=True)))
    return "\n".join(lines)


def amount(num_bytes: int) -> str:
    """Bytes in a unit that people read, e.g. ``1.5 GiB``."""
    value, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{num_bytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"
