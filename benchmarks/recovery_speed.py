"""Claim ``recovery-speed``: replaying only the failed stages is faster than rolling back the whole pipeline.

Times of forward passes, backward passes and updates are measured on the real engine, one stage at a time, for each set
of frozen operators that occurs in a window. The virtual clock of ``planning/cost/pipeline_clock.py`` then simulates
recoveries of pipelines with many stages and one core per stage. In the simulation, sends take no time, which makes a
rollback of all stages faster. The script also checks that the results are the same with the measured time of a send.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.recovery_costs import WINDOW_ITERATIONS, Case, RecoveryCost, ablation
from benchmarks.report import finish, parse_arguments
from benchmarks.stage_times import SIZES, Times, measure, measure_send

ID = "recovery-speed"
THRESHOLD = (
    "executions exactly failed stages / PP; less wall time than global rollback for every PP, schedule and stage"
)
STAGES, QUICK_STAGES = (3, 4, 8, 12), (3, 4)
CHUNKS = (1, 2)
REPEATS, QUICK_REPEATS = 9, 2
MEASURE_SECONDS = 600.0
SENT_BYTES = {"moe_micro": 16 * 32 * 4, "wide": 128 * 256 * 4}
"""Bytes of a tensor at a pipeline boundary, by model: sequence length, hidden size, bytes of a value."""
SEND_REPEATS, QUICK_SEND_REPEATS = 200, 20
PAPER_STAGES, PAPER_PERCENT = 3, 23
"""Number of stages in MoEvement, section 3.4, figure 9, and the saving reported there in per cent."""
PAPER_MICROBATCHES = (4, 12, 24)
"""Numbers of microbatches. The first is that of the paper's job of three stages: 512 samples, 32 per microbatch, four
pipelines."""
SPEED_SIZE, ABLATION_SIZE = "moe_micro", "wide"
ABLATION_STAGES, QUICK_ABLATION_STAGES = (3, 12), (3,)
Table = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of one failure: a global rollback, and a replay of the failed stages only."""

    case: Case
    size: str
    failed: tuple[int, ...]
    send_seconds: float
    whole: RecoveryCost
    localized: RecoveryCost

    @property
    def less_percent(self) -> float:
        """Return the wall time in per cent that the localized replay saves."""
        return 100 * (1 - self.localized.wall_seconds / self.whole.wall_seconds)

    @property
    def holds(self) -> bool:
        """Return whether the replay has exactly the failed stages' share of executions, and takes less wall time."""
        share = self.localized.num_executions * self.case.num_stages == self.whole.num_executions * len(self.failed)
        return share and self.localized.wall_seconds < self.whole.wall_seconds

    def row(self) -> list[str]:
        """Return the row of the table."""
        return [
            str(self.case.num_stages),
            self.case.name,
            str(self.case.shape.num_microbatches),
            ", ".join(map(str, self.failed)),
            f"{self.localized.num_executions:g} / {self.whole.num_executions:g}",
            f"{1e3 * self.whole.wall_seconds:.0f}",
            f"{1e3 * self.localized.wall_seconds:.0f}",
            f"{self.less_percent:.0f} %",
            f"{self.whole.cpu_seconds:.2f}",
            f"{self.localized.cpu_seconds:.2f}",
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and judge the claim."""
    arguments = parse_arguments(__doc__, argv)
    quick = arguments.quick
    stages = QUICK_STAGES if quick else STAGES
    cases = [Case(num_stages=num, num_chunks=chunks) for num in stages for chunks in CHUNKS]
    steps = [ablation(Case(num_stages=num)) for num in (QUICK_ABLATION_STAGES if quick else ABLATION_STAGES)]
    every = [*cases, *(case for step in steps for case in step.values())]
    requests = {request for case in every for request in case.requests()}
    repeats = QUICK_REPEATS if quick else REPEATS
    times = {size: measure(size, requests, repeats=repeats, timeout_seconds=MEASURE_SECONDS) for size in SIZES}
    send_repeats = QUICK_SEND_REPEATS if quick else SEND_REPEATS
    sends = {
        size: measure_send(num_bytes, repeats=send_repeats, timeout_seconds=MEASURE_SECONDS)
        for size, num_bytes in SENT_BYTES.items()
    }
    found = [
        one
        for size in SIZES
        for seconds in (0.0, sends[size])
        for case in [*cases, *paper_cases()]
        for one in compare(case, size, times[size], seconds)
    ]
    tables = [speed_table(found), paper_table(found), ablation_table(steps, times[ABLATION_SIZE])]
    print("\n\n".join(map(as_text, tables)), flush=True)
    passed, figure = judge(found, tables[-1])
    return finish(
        arguments.out,
        ID,
        passed=passed,
        figure=figure,
        threshold=THRESHOLD,
        counts={
            "comparisons": len(found),
            "stage_times": sum(map(len, times.values())),
            "iterations_each": repeats,
            "window_iterations": WINDOW_ITERATIONS,
        },
        details={
            "tables": tables,
            "send_seconds": sends,
            "stage_times": {size: listed(of_size) for size, of_size in times.items()},
            "comparisons": [asdict(one) for one in found],
        },
    )


def paper_cases() -> list[Case]:
    """Return cases of three stages with increasing numbers of microbatches. With more microbatches, the time of filling
    and draining the pipeline, which only a rollback loses, is a smaller share."""
    return [Case(num_stages=PAPER_STAGES, num_microbatches=number) for number in PAPER_MICROBATCHES]


def compare(case: Case, size: str, times: Times, send_seconds: float) -> Iterator[Comparison]:
    """Compare every kind of failure: the first stage, a middle one, the last one, and two neighbouring stages."""
    middle, last = case.num_stages // 2, case.num_stages - 1
    whole = case.recover(times, send_seconds=send_seconds)
    for failed in ((0,), (middle,), (last,), (middle - 1, middle)):
        localized = case.recover(times, failed, send_seconds)
        yield Comparison(
            case=case, size=size, failed=failed, send_seconds=send_seconds, whole=whole, localized=localized
        )


def judge(found: Sequence[Comparison], steps: Table) -> tuple[bool, str]:
    """Return (whether the claim holds, figure)."""
    main_ones = [one for one in found if one.size == SPEED_SIZE and not one.send_seconds and len(one.failed) == 1]
    less = [one.less_percent for one in main_ones]
    like_paper = [one.less_percent for one in main_ones if is_like_paper(one.case)]
    shares = ", ".join(f"{row[0].removeprefix('+ ')} {row[-2]}" for row in steps["rows"])
    figure = (
        f"{sum(one.holds for one in found)} of {len(found)} comparisons hold: one failed stage replays in "
        f"{min(less):.0f} to {max(less):.0f} % less time than all, PP={PAPER_STAGES} with "
        f"{PAPER_MICROBATCHES[0]} microbatches in {min(like_paper):.0f} to {max(like_paper):.0f} % less (the paper: "
        f"{PAPER_PERCENT} %), with 1/PP of the executions; step by step at {steps['header'][-2]}: {shares}"
    )
    return all(one.holds for one in found), figure


def is_like_paper(case: Case) -> bool:
    """Return whether a case has the paper's numbers of stages and microbatches."""
    return (case.num_stages, case.num_chunks, case.num_microbatches) == (PAPER_STAGES, 1, PAPER_MICROBATCHES[0])


def speed_table(found: Sequence[Comparison]) -> Table:
    """Return a table with one row for every pipeline and failure of the micro model, in which sends take no time."""
    rows = [one.row() for one in found if one.size == SPEED_SIZE and not one.send_seconds]
    return _table("Localized replay against global rollback, micro model, by failed stages", rows)


def paper_table(found: Sequence[Comparison]) -> Table:
    """Return a table of pipelines with three stages, for the model whose time is mostly spent on matrix products."""
    rows = [
        one.row()
        for one in found
        if one.size == ABLATION_SIZE and not one.send_seconds and one.case.num_stages == PAPER_STAGES
    ]
    return _table(f"Localized replay against global rollback, {PAPER_STAGES} stages of a wider model", rows)


def _table(title: str, rows: list[list[str]]) -> Table:
    header = ["PP", "schedule", "microbatches", "failed", "executions", "global ms", "localized ms", "less"]
    return {"title": title, "header": [*header, "global CPU s", "localized CPU s"], "rows": rows}


def ablation_table(steps: Sequence[dict[str, Case]], times: Times) -> Table:
    """Return a table of recoveries to which one technique after the other is added: their wall and CPU time, and the
    share of the first row."""
    columns = [list(ablation_column(of_stages, times)) for of_stages in steps]
    names = [*steps[0], "+ the failed stage alone"]
    header = ["technique"]
    for of_stages in steps:
        name = f"PP={next(iter(of_stages.values())).num_stages}"
        header += [f"{name} ms", f"{name}", f"{name} CPU s"]
    rows = [[name, *(cell for column in columns for cell in column[row])] for row, name in enumerate(names)]
    return {
        "title": "One technique after the other, a middle stage of a wider model, 1F1B",
        "header": header,
        "rows": rows,
    }


def ablation_column(steps: dict[str, Case], times: Times) -> Iterator[list[str]]:
    """Yield for each step its milliseconds, its share of the first row's wall time, and its CPU seconds."""
    costs = [case.recover(times) for case in steps.values()]
    newest = list(steps.values())[-1]
    costs.append(newest.recover(times, (newest.num_stages // 2,)))
    for cost in costs:
        share = cost.wall_seconds / costs[0].wall_seconds
        yield [f"{1e3 * cost.wall_seconds:.0f}", f"{share:.3f}", f"{cost.cpu_seconds:.2f}"]


def listed(times: Times) -> list[dict[str, Any]]:
    """Return the measured times as JSON values."""
    ordered = sorted(times.items(), key=lambda item: (item[0][0], sorted(item[0][1])))
    return [{"stage": kind, "frozen": sorted(pattern), **asdict(one)} for (kind, pattern), one in ordered]


def as_text(table: Table) -> str:
    """Format a table for a terminal."""
    rows = [table["header"], *table["rows"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([table["title"], *lines])


if __name__ == "__main__":
    raise SystemExit(main())
