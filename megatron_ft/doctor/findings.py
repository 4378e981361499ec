"""Findings of a machine's checks. A finding states an observation and, if it is a problem, how to fix it."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from megatron_ft.formatting import counted

LEVELS = ("error", "warning", "info")
"""Levels of findings. An ``error`` would stop the job. A ``warning`` may stop the job or slow it down. An ``info`` is
no problem."""
_INDENT = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of a check."""

    check: str
    """Name of the check that made the finding."""
    level: str
    """Level of the finding, one of ``LEVELS``."""
    what: str
    fix: str = ""
    """Action that solves the problem; empty for level ``info``."""

    def __post_init__(self) -> None:
        assert self.level in LEVELS, f"level={self.level!r}: must be one of {LEVELS}"
        assert self.fix or self.level == "info", f"{self.what}: must have a fix, because the level is not info"

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def error(cls, check: str, what: str, fix: str) -> "Finding":
        """Make a finding about something that would stop the job."""
        return cls(check=check, level="error", what=what, fix=fix)

    @classmethod
    def info(cls, check: str, what: str) -> "Finding":
        """Make a finding about something that is no problem."""
        return cls(check=check, level="info", what=what)

    @classmethod
    def warning(cls, check: str, what: str, fix: str) -> "Finding":
        """Make a finding about something that may stop the job or slow it down."""
        return cls(check=check, level="warning", what=what, fix=fix)


def exit_code(findings: Iterable[Finding], *, strict: bool) -> int:
    """Return the command's exit code: 2 if there are errors, 1 if ``strict`` and there are warnings, otherwise 0."""
    levels = {finding.level for finding in findings}
    if "error" in levels:
        return 2
    return 1 if strict and "warning" in levels else 0


def render(findings: Sequence[Finding]) -> str:
    """Format findings as text, the most severe first. The last line counts the findings of each level."""
    lines = []
    for finding in sorted(findings, key=lambda finding: LEVELS.index(finding.level)):
        lines.append(f"{finding.level:<9}{finding.check:<{_INDENT - 9}}{finding.what}")
        if finding.fix:
            lines.append(f"{'':<{_INDENT}}fix: {finding.fix}")
    counts = [sum(finding.level == level for finding in findings) for level in LEVELS]
    nouns = ("error", "warning", "fact")
    lines.append(", ".join(counted(n, noun) for n, noun in zip(counts, nouns, strict=True)))
    return "\n".join(lines)
