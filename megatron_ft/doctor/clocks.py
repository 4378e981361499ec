"""Clocks: records carry the wall clock's time; whoever waits uses the monotonic one."""

import shutil
import subprocess
import time
from dataclasses import dataclass

from megatron_ft.doctor.findings import Finding, error, told, warning

OBSERVED_SECONDS = 0.1
LARGEST_DRIFT_SECONDS = 0.005
"""Between both clocks over ``OBSERVED_SECONDS``: NTP slews them alike (clock_gettime(2)), so that only a step tells."""
EARLIEST_UNIX_SECONDS = 1_735_689_600
"""2025-01-01: before anything that this project runs with was released."""
_TOOL_SECONDS = 2.0
_READINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFacts:
    """What was seen of this machine's clocks."""

    wall_unix_seconds: float
    elapsed_monotonic_seconds: float
    elapsed_wall_seconds: float
    """By the wall clock, over the same time."""
    is_synchronized: bool | None
    """By whoever sets the clock; None where nobody says."""
    source: str
    """Who said so, or why nobody did."""


def observe_clocks() -> ClockFacts:
    """Look; takes ``OBSERVED_SECONDS``, in which the clock's keeper is asked."""
    begin, wall = _both()
    is_synchronized, source = _ask_keeper()
    while (rest := begin + OBSERVED_SECONDS - time.monotonic()) > 0:
        time.sleep(rest)
    end, wall_end = _both()
    return ClockFacts(
        wall_unix_seconds=wall,
        elapsed_monotonic_seconds=end - begin,
        elapsed_wall_seconds=wall_end - wall,
        is_synchronized=is_synchronized,
        source=source,
    )


def _both() -> tuple[float, float]:
    """(monotonic, wall) of one moment: the reading that was least interrupted."""
    readings = []
    for _ in range(_READINGS):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        readings.append((after - before, (before + after) / 2, wall))
    _, monotonic, wall = min(readings)
    return monotonic, wall


def _ask_keeper() -> tuple[bool | None, str]:
    """chrony knows best; timedatectl(1) tells the kernel's own mark."""
    commands = (["chronyc", "-c", "tracking"], ["timedatectl", "show", "--property=NTPSynchronized", "--value"])
    reasons = []
    for command in commands:
        if shutil.which(command[0]) is None:
            reasons.append(f"no {command[0]}")
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as reason:
            reasons.append(f"{command[0]}: {reason}")
            continue
        answer = understand(command[0], done.stdout) if done.returncode == 0 else None
        if answer is not None:
            return answer, command[0]
        first, *_ = [*done.stderr.splitlines(), *done.stdout.splitlines(), "no answer"]
        reasons.append(f"{command[0]}: {first}")
    return None, "; ".join(reasons)


def understand(tool: str, output: str) -> bool | None:
    """What a tool's answer means; None where it says nothing of the kind.

    Sources: chronyc(1), ``tracking``, whose last field is the leap status; timedatectl(1), ``show``.
    """
    words = output.strip().split(",")
    if tool == "timedatectl":
        return {"yes": True, "no": False}.get(words[0])
    return words[-1] != "Not synchronised" if len(words) > 10 else None


def check_clocks(facts: ClockFacts) -> list[Finding]:
    """Clocks that jump, stand elsewhere in history, or that nobody sets."""
    drift = facts.elapsed_wall_seconds - facts.elapsed_monotonic_seconds
    found = []
    if facts.wall_unix_seconds < EARLIEST_UNIX_SECONDS:
        year = time.gmtime(facts.wall_unix_seconds).tm_year
        what = f"the wall clock says it is {year}: certificates fail, and records cannot be put in order"
        found.append(error("clocks", what, "set it: chronyc makestep, or timedatectl set-ntp true"))
    if abs(drift) > LARGEST_DRIFT_SECONDS:
        what = f"the wall clock moved by {1e3 * drift:+.1f} ms against the monotonic one while it was watched"
        found.append(warning("clocks", what, "find who sets it; times of this machine's records cannot be compared"))
    if facts.is_synchronized is False:
        what = f"not synchronized ({facts.source}): times of several nodes' records cannot be compared"
        found.append(warning("clocks", what, "start chronyd, or timedatectl set-ntp true"))
    state = {True: "synchronized", False: "not synchronized", None: "synchronization unknown"}[facts.is_synchronized]
    return found or [told("clocks", f"{state} ({facts.source}), wall and monotonic within {1e3 * abs(drift):.1f} ms")]
