"""Kills whole nodes of a living job from outside: agent, snapshot server and ranks at one instant.

``NodeKiller`` does it at no chosen moment of an iteration. ``StoppedNodeKiller`` does it in a chosen phase: the rank of
the victim stops itself there (a failpoint), and its whole node is killed while it stands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kill_peers import records_of
from benchmarks.localized_jobs import Event, FaultJob, formed_by
from megatron_ft.control.admin import AdminClient
from megatron_ft.failures.injecting import Injector, NotInjected


@dataclass(slots=True)
class NodeKiller:
    """Asked with a job's events so far, it kills the next node once its membership has trained for long enough."""

    job: FaultJob
    run_dir: Path
    num_killed: int = 0
    problems: list[str] = field(default_factory=list)
    """Faults that could not be injected."""

    def __call__(self, events: Sequence[Event]) -> bool:
        """Whether the job may end."""
        if self.num_killed == len(self.job.faults) or self.problems:
            return bool(self.problems) or self.job.has_ended(events)
        fault = self.job.faults[self.num_killed]
        generation, later = formed_by(events)
        if generation == fault["generation"] and len(later) >= int(str(fault["after"])):
            changes = [event for event in events if event["kind"] == "membership_changed"]
            nodes = changes[-1]["nodes"] if changes else range(self.job.layout.num_ranks)
            injector = injector_for(self.run_dir)
            try:
                injector.kill([nodes[int(str(fault["rank"]))]], rank=fault["rank"], phase=fault["phase"])
            except NotInjected as error:
                self.problems.append(str(error))
            self.num_killed += 1
        return False


@dataclass(slots=True)
class StoppedNodeKiller:
    """Asked with a job's events so far, it kills the nodes whose ranks have stopped themselves at their failpoints."""

    run_dir: Path
    at_once: Sequence[int]
    """Number of nodes in each kill; it waits until as many ranks have stopped."""
    has_ended: Callable[[Sequence[Event]], bool]
    num_killed: int = 0
    """Nodes."""
    problems: list[str] = field(default_factory=list)
    """Faults that could not be injected."""

    def __call__(self, events: Sequence[Event]) -> bool:
        """Whether the job may end."""
        sizes, left = [], self.num_killed
        for size in self.at_once:
            if left <= 0:
                sizes.append(size)
            left -= size
        stopped = [hit for hit in records_of(self.run_dir / "failpoints.jsonl") if hit["action"] == "stop"]
        due = stopped[self.num_killed :][: sizes[0]] if sizes else []
        if due and len(due) == sizes[0] and not self.problems:
            try:
                injector_for(self.run_dir).kill([hit["node"] for hit in due], phase=due[0]["phase"])
            except NotInjected as error:
                self.problems.append(str(error))
            self.num_killed += len(due)
        return bool(self.problems) or (self.num_killed == sum(self.at_once) and self.has_ended(events))


def injector_for(run_dir: Path) -> Injector:
    """Create an injector for jobs of one rank a node."""
    return Injector(run_dir=run_dir, ranks_per_node=1, connect=lambda: AdminClient(run_dir))
