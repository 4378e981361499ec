"""Clock checks: records carry wall-clock times, and waits use the monotonic clock."""

import shutil
import subprocess
import time
from dataclasses import dataclass

from megatron_ft.doctor.findings import Finding, error, info, warning

OBSERVED_SECONDS = 0.1
LARGEST_DRIFT_SECONDS = 0.005
"""Largest accepted difference of both clocks over ``OBSERVED_SECONDS``. NTP slews both in the same way
(clock_gettime(2)), so only a step is larger."""
EARLIEST_UNIX_SECONDS = 1_735_689_600
"""2025-01-01, earlier than the releases of all required software."""
_TOOL_SECONDS = 2.0
_READINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFacts:
    """Observations of this machine's clocks."""

    wall_unix_seconds: float
    elapsed_monotonic_seconds: float
    elapsed_wall_seconds: float
    """Same time by the wall clock."""
    is_synchronized: bool | None
    """Answer of the time service; None where there is no answer."""
    source: str
    """Program that answered, or why none did."""


def observe_clocks() -> ClockFacts:
    """Observe both clocks for ``OBSERVED_SECONDS`` and meanwhile ask the time service."""
    begin, wall = _both()
    # The calls take a part of the time that is waited for anyway.
    is_synchronized, source = _ask_time_service()
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
        # An interruption between two readings looks like a step of one clock.
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        readings.append((after - before, (before + after) / 2, wall))
    _, monotonic, wall = min(readings)
    return monotonic, wall


def _ask_time_service() -> tuple[bool | None, str]:
    """Ask chrony first, then timedatectl(1), which reports the kernel's flag."""
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
    """Interpret the answer of a tool; None where it says nothing about synchronization.

    Sources: chronyc(1), ``tracking``, whose last field is the leap status; timedatectl(1), ``show``.
    """
    words = output.strip().split(",")
    if tool == "timedatectl":
        return {"yes": True, "no": False}.get(words[0])
    # Fewer fields are an error message of chronyc, not an answer.
    return words[-1] != "Not synchronised" if len(words) > 10 else None


def check_clocks(facts: ClockFacts) -> list[Finding]:
    """Report clocks that jump, are set to an impossible date, or are not synchronized."""
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
    return found or [info("clocks", f"{state} ({facts.source}), wall and monotonic within {1e3 * abs(drift):.1f} ms")]
