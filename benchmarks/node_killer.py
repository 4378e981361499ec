"""Kills whole nodes of a living job that keeps its layout: agent, keeper and ranks at once, at no chosen moment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.localized_jobs import Event, FaultJob, formed_by
from megatron_ft.control.operating import Operator
from megatron_ft.failures.injecting import Injector, NotInjected


@dataclass(slots=True)
class NodeKiller:
    """Asked with a job's events so far, it kills the next node once its membership has trained for long enough."""

    job: FaultJob
    run_dir: Path
    num_killed: int = 0
    problems: list[str] = field(default_factory=list)
    """What could not be injected."""

    def __call__(self, events: Sequence[Event]) -> bool:
        """Whether the job may end."""
        if self.num_killed == len(self.job.faults) or self.problems:
            return bool(self.problems) or self.job.has_ended(events)
        fault = self.job.faults[self.num_killed]
        generation, later = formed_by(events)
        if generation == fault["generation"] and len(later) >= int(str(fault["after"])):
            changes = [event for event in events if event["kind"] == "membership_changed"]
            nodes = changes[-1]["nodes"] if changes else range(self.job.layout.num_ranks)
            injector = Injector(run_dir=self.run_dir, ranks_per_node=1, connect=lambda: Operator(self.run_dir))
            try:
                injector.kill([nodes[int(str(fault["rank"]))]], rank=fault["rank"], phase=fault["phase"])
            except NotInjected as error:
                self.problems.append(str(error))
            self.num_killed += 1
        return False
