"""Compares memberships of a job that changes its size with new jobs of the same size, as a second kind of reference.

The first reference is a scripted run, which saves a dense checkpoint after every iteration. The new job loads the
checkpoint of the iteration after which the membership began, and uses the membership's placement. Losses, the state of
every rank, the placement, and the loads for later placements must be equal in every bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.elastic_jobs import Bench, Recorded
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import config_of
from megatron_ft.events import MembershipChanged
from megatron_ft.planning.recovery.layout import JobLayouts, MembershipLayout
from megatron_ft.snapshot.storage.manifest import Manifest
from megatron_ft.telemetry.read import read_events
from tools.can_recover import read_config

SAVING = ("checkpoint.save_interval_iterations=1", "checkpoint.keep_last=0")
"""Overrides with which a job saves a dense checkpoint after every iteration and keeps them all."""
MOST_COMPARED = 4
"""Largest number of iterations of a membership that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of one membership with a new job of its size."""

    change: int
    """Number of the change with which the membership began, from 0."""
    num_ranks: int
    num_compared: int
    """Number of losses and states that were compared."""
    problems: list[str] = field(default_factory=list)


def compare_with_fresh(
    bench: Bench, words: Sequence[str], killed: Recorded, run_dir: Path, changes: Sequence[int]
) -> Iterator[Comparison]:
    """Compare memberships of a job with new jobs of their sizes.

    Args:
        words: overrides of the job's layout and protection.
        killed: records of the job.
        run_dir: folder of the job's scripted reference, which has checkpoints of all iterations.
        changes: numbers of the changes of membership to compare. A membership without an iteration of its own is left
            out.
    """
    config, layouts = read_config(run_dir / "config.yaml"), _layouts(run_dir)
    for number in changes:
        loaded = killed.changes[number]["iteration"]
        later = killed.changes[number + 1 : number + 2]
        last = later[0]["iteration"] if later else killed.last_iteration - 1
        last = min(last, loaded + MOST_COMPARED)
        if last <= loaded or loaded == 0:
            continue
        layout = layouts[loaded]
        overrides = [*words, *SAVING, *_overrides(config, layout, run_dir, loaded, last)]
        with bench.running(overrides) as run:
            fresh = Recorded.of(run, first=loaded + 1)
            problems = [*fresh.problems, *killed.differences(fresh, loaded + 1, last)]
            problems += _other_placement(run_dir, run.run_dir, last)
        yield Comparison(
            change=number,
            num_ranks=len(layout.processes),
            num_compared=killed.num_compared(fresh, loaded + 1, last),
            problems=[f"new job from iteration {loaded}: {problem}" for problem in problems],
        )


def _layouts(run_dir: Path) -> dict[int, MembershipLayout]:
    """Return the layouts of memberships by the iteration after which each began; the last one if several began."""
    config = read_config(run_dir / "config.yaml")
    changes = [event for event in read_events(run_dir) if isinstance(event, MembershipChanged)]
    _, *found = JobLayouts.of(config).history(event.nodes for event in changes)
    pairs = zip(changes, found, strict=True)
    return {event.iteration: layout for event, layout in pairs if isinstance(layout, MembershipLayout)}


def _overrides(config: JobConfig, layout: MembershipLayout, run_dir: Path, loaded: int, last: int) -> list[str]:
    # Each rank of the new job has its own node, in the failure domain of the rank's node in the original job.
    adapted, names = config_of(config, layout.rank_nodes), dict(enumerate(config.topology.failure_domains))
    domains = ",".join(names.get(node, f"node{node}") for node in layout.rank_nodes)
    placement = run_dir / "placements" / f"iter_{loaded + 1:07d}.json"
    words = [
        f"launch.num_nodes={len(layout.rank_nodes)}",
        f"topology.failure_domains=[{domains}]",
        f"checkpoint.load={run_dir / 'checkpoints' / f'iter_{loaded:07d}'}",
        f'placement.schedule=["{loaded + 1}:{placement}"]',
        f"placement.min_replicas={adapted.placement.min_replicas}",
        # The job trains one iteration more than is compared, because the digest of its last iteration may be missing.
        f"training.exit_at_iteration={last + 1}",
    ]
    if config.placement.state_copies is not None:
        words.append(f"placement.state_copies={adapted.placement.state_copies}")
    if config.snapshot.policy is not None:
        words.append(f"snapshot.num_peer_copies={adapted.snapshot.num_peer_copies}")
    return words


def _other_placement(reference: Path, fresh: Path, iteration: int) -> list[str]:
    mine, theirs = (_placement(run_dir, iteration) for run_dir in (reference, fresh))
    return [] if mine == theirs else [f"placement or loads after iteration {iteration}"]


def _placement(run_dir: Path, iteration: int) -> Any:
    """Return the placement and the loads in the checkpoint of an iteration."""
    from megatron.core import dist_checkpointing

    from megatron_ft.mcore.checkpoint.state import OURS_KEY

    directory = run_dir / "checkpoints" / f"iter_{iteration:07d}"
    Manifest.verified(directory)  # Megatron reads a pickle
    return dist_checkpointing.load_common_state_dict(str(directory))[OURS_KEY]["extra"]["placement"]
