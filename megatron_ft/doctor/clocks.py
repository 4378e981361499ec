"""Checks of this machine's clocks. Records contain times of the wall clock; waits are timed by the monotonic clock."""

import shutil
import subprocess
import time
from dataclasses import dataclass

from megatron_ft.doctor.findings import Finding

OBSERVED_SECONDS = 0.1
LARGEST_DRIFT_SECONDS = 0.005
"""Largest accepted difference between a duration on the wall clock and the same duration on the monotonic clock. NTP
adjusts the speed of both clocks alike (clock_gettime(2)). So a larger difference means that a program has set the wall
clock."""
EARLIEST_UNIX_SECONDS = 1_735_689_600
"""Earliest plausible time of the wall clock: 2025-01-01. The required software was released later."""
_TOOL_SECONDS = 2.0
_READINGS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFacts:
    """Observations of this machine's clocks."""

    wall_unix_seconds: float
    elapsed_monotonic_seconds: float
    elapsed_wall_seconds: float
    """Seconds that passed on the wall clock while both clocks were observed."""
    is_synchronized: bool | None
    """Whether the time service reports the clock as synchronized; None if no service answers."""
    source: str
    """Program that reported ``is_synchronized``, or the reason why no program reported it."""

    def check(self) -> list[Finding]:
        """Report a wall clock that has an impossible date, is not synchronized, or was set during the observation."""
        drift = self.elapsed_wall_seconds - self.elapsed_monotonic_seconds
        found = []
        if self.wall_unix_seconds < EARLIEST_UNIX_SECONDS:
            year = time.gmtime(self.wall_unix_seconds).tm_year
            what = f"the wall clock shows the year {year}: certificates are invalid, and records have wrong times"
            found.append(Finding.error("clocks", what, "set the clock: chronyc makestep, or timedatectl set-ntp true"))
        if abs(drift) > LARGEST_DRIFT_SECONDS:
            what = f"the wall clock moved by {1e3 * drift:+.1f} ms relative to the monotonic clock during this check"
            found.append(
                Finding.warning(
                    "clocks", what, "find and stop the program that sets this clock: it makes times in records wrong"
                )
            )
        if self.is_synchronized is False:
            what = (
                f"the wall clock is not synchronized ({self.source}): records of different nodes cannot be put in order"
            )
            found.append(Finding.warning("clocks", what, "start chronyd, or run timedatectl set-ntp true"))
        state = {True: "synchronized", False: "not synchronized", None: "synchronization unknown"}[self.is_synchronized]
        agreement = f"wall and monotonic clock agree within {1e3 * abs(drift):.1f} ms"
        return found or [Finding.info("clocks", f"{state} ({self.source}), {agreement}")]

    @classmethod
    def observe(cls) -> "ClockFacts":
        """Observe both clocks for ``OBSERVED_SECONDS``. Ask the time service if the wall clock is synchronized."""
        begin, wall = _both()
        # The time service is asked during the observation.
        is_synchronized, source = _ask_time_service()
        while (rest := begin + OBSERVED_SECONDS - time.monotonic()) > 0:
            time.sleep(rest)
        end, wall_end = _both()
        return cls(
            wall_unix_seconds=wall,
            elapsed_monotonic_seconds=end - begin,
            elapsed_wall_seconds=wall_end - wall,
            is_synchronized=is_synchronized,
            source=source,
        )


def _both() -> tuple[float, float]:
    """Read both clocks together, several times. Return the (monotonic, wall) times of the attempt that was fastest."""
    readings = []
    for _ in range(_READINGS):
        # An interruption between two readings looks like a step of one clock, so the fastest readings are used.
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        readings.append((after - before, (before + after) / 2, wall))
    _, monotonic, wall = min(readings)
    return monotonic, wall


def _ask_time_service() -> tuple[bool | None, str]:
    """Ask chrony whether the clock is synchronized. If chrony does not answer, ask timedatectl(1)."""
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
        answer = _understand(command[0], done.stdout) if done.returncode == 0 else None
        if answer is not None:
            return answer, command[0]
        first, *_ = [*done.stderr.splitlines(), *done.stdout.splitlines(), "no answer"]
        reasons.append(f"{command[0]}: {first}")
    return None, "; ".join(reasons)


def _understand(tool: str, output: str) -> bool | None:
    """Return whether ``output`` of chronyc or timedatectl reports a synchronized clock; None if it does not say.

    Sources: chronyc(1), ``tracking``, whose last field is the leap status; timedatectl(1), ``show``.
    """
    words = output.strip().split(",")
    if tool == "timedatectl":
        return {"yes": True, "no": False}.get(words[0])
    # Output with fewer fields is an error message of chronyc and no answer.
    return words[-1] != "Not synchronised" if len(words) > 10 else None
