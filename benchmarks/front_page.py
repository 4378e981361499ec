"""Writes the six rows of figures in README.md from the newest CPU results of their claims.

A cell contains one short figure. docs/claims.md contains conditions, bounds and machines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.claims import Claim
from benchmarks.kill_peers import percentile
from megatron_ft.errors import ConfigError

Results = Mapping[str, dict[str, Any]]
"""Newest result by claim id."""
HARDWARE = "cpu"
FAILED = " (**FAIL**)"
"""Mark of a row with a failed claim."""
SPEED_SIZE = "moe_micro"
"""README.md shows the results of `recovery-speed` for this model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Row of the table: a figure of this project, and the figures of alternatives."""

    claims: tuple[str, ...]
    """Claims of the row. The first one gives the row its name."""
    ours: Callable[[Results], str]
    others: Callable[[Results], str]


def front_page_table(claims: Mapping[str, Claim], results: Mapping[tuple[str, str], dict[str, Any]]) -> str:
    """Return the rows as a Markdown table. A row is marked as failed if a claim of it has failed.

    Raises:
        ConfigError: a claim of a row has no result on a CPU.
    """
    lines = ["| what | megatron-ft | others |", "|---|---|---|"]
    for row in ROWS:
        own = {claim: _newest(claim, results) for claim in row.claims}
        first = claims[row.claims[0]]
        what = f"[{first.short}](docs/claims.md#{first.id})"
        mark = "" if all(result["passed"] for result in own.values()) else FAILED
        lines.append(f"| {what} | {row.ours(own)}{mark} | {row.others(own)} |")
    return "\n".join(lines)


def _newest(claim: str, results: Mapping[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    result = results.get((claim, HARDWARE))
    if result is None:
        raise ConfigError.of("README.md", claim, f"has no result on {HARDWARE}: run `make prove ID={claim}`")
    return result


def _kills(results: Results, subject: str) -> str:
    """Return median and 95th percentile in seconds, and the largest number of iterations lost to one fault."""
    faults = results["kill-to-commit"]["details"][subject]["faults"]
    seconds = [fault["seconds"] for fault in faults]
    lost = max(fault["iterations_lost"] for fault in faults)
    p50, p95 = percentile(seconds, 50), percentile(seconds, 95)
    digits = 2 if p50 < 10 else 1
    return f"{p50:.{digits}f} / {p95:.{digits}f} s, {lost} lost"


def _less_time(results: Results) -> str:
    """Return the smallest and largest saving over all pipelines, schedules and stages, as in the claim's figure."""
    comparisons = [
        comparison
        for comparison in results["recovery-speed"]["details"]["comparisons"]
        if comparison["size"] == SPEED_SIZE and not comparison["send_seconds"] and len(comparison["failed"]) == 1
    ]
    less = [1 - each["localized"]["wall_seconds"] / each["whole"]["wall_seconds"] for each in comparisons]
    return f"{100 * min(less):.0f} to {100 * max(less):.0f} % less time"


_KILLED = {"elastic-bitwise": "nodes", "localized-bitwise": "stages", "sparse-bitwise": "jobs"}
"""Word for what the jobs of each claim lose, by claim id."""


def _equal(results: Results) -> str:
    counts = {killed: results[claim]["counts"] for claim, killed in _KILLED.items()}
    return ", ".join(f"{count['passed']} of {count['trials']} {killed}" for killed, count in counts.items())


def _blocked(results: Results) -> str:
    ours = results["snapshot-stall"]["details"]["summary"]["systems"]["ours"]
    return f"{100 * ours['share_of_iteration']:.2f} % of an iteration"


def _blocked_by_torch(results: Results) -> str:
    torch = results["snapshot-stall"]["details"]["summary"]["systems"]["dcp"]
    return f"torch `async_save` {100 * torch['share_of_iteration']:.1f} %"


def _imbalance(results: Results, name: str) -> str:
    return f"{results['balance']['details']['rows'][name]['mean']:.2f}"


def _overhead(results: Results) -> str:
    return f"{max(size['ratio'] for size in results['loop-overhead']['details'].values()):.3f}x"


ROWS = (
    Row(
        claims=("kill-to-commit",),
        ours=lambda results: _kills(results, "ours"),
        others=lambda results: f"torchft {_kills(results, 'torchft')}; torchrun {_kills(results, 'torchrun')}",
    ),
    Row(claims=tuple(_KILLED), ours=_equal, others=lambda _: "-"),
    Row(claims=("recovery-speed",), ours=_less_time, others=lambda _: "rollback of all stages"),
    Row(claims=("snapshot-stall",), ours=_blocked, others=_blocked_by_torch),
    Row(
        claims=("balance",),
        ours=lambda results: _imbalance(results, "overlap_search"),
        others=lambda results: f"one copy per expert {_imbalance(results, 'static EP')}",
    ),
    Row(claims=("loop-overhead",), ours=_overhead, others=lambda _: "plain Megatron-Core loop 1"),
)
