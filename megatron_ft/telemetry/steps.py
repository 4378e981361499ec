"""Records cut into steps, one for each iteration, for trackers that take a step only once and in rising order."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft import events
from megatron_ft.events import Evaluation, ExpertLoad, Metrics, Record
from megatron_ft.telemetry.expert_load import load_figures
from megatron_ft.telemetry.run_figures import RunFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All figures of one iteration."""

    iteration: int
    figures: Mapping[str, float]
    """Metric name to figure."""


class Steps:
    """Takes records, oldest first; a step is complete when the next iteration is told of.

    Iterations that were told of again replace those before as long as they are in no step that was ``sent``.
    """

    def __init__(self, *, sent: int) -> None:
        """``sent``: the newest iteration that the tracker has."""
        self.run = RunFigures()
        self._sent = sent
        self._iteration = self._highest = 0
        self._figures: dict[str, float] = {}

    def sent(self, iteration: int) -> None:
        """The tracker has all steps up to ``iteration``: none of them can be given again."""
        self._sent = max(self._sent, iteration)

    def take(self, record: Record) -> Step | None:
        """Fold one more record in; returns the step that it completes."""
        complete = None
        match record:
            case events.RunStarted():
                complete = self._go_back(record.resumed_from_iteration or 0)
            case events.MembershipChanged() | events.RecoveryDecided():
                if record.iteration < self._iteration:
                    self._forget(record.iteration)
            case Metrics() | ExpertLoad() | Evaluation():
                complete = self._advance(record.iteration)
        self.run.take(record)
        if isinstance(record, (Metrics, ExpertLoad, Evaluation)) and record.iteration == self._iteration > self._sent:
            self._figures |= _own(record)
        return complete

    def finish(self) -> Step | None:
        """The step of the newest iteration, as far as it is told of."""
        is_first_time, self._highest = self._iteration > self._highest, max(self._highest, self._iteration)
        figures, self._figures = self._figures, {}
        if not figures:
            if is_first_time and self._iteration <= self._sent:
                self.run.hand_out()  # it is in the step that the tracker has of this iteration
            return None
        return Step(iteration=self._iteration, figures=figures | self.run.hand_out())

    def _advance(self, iteration: int) -> Step | None:
        if iteration <= self._iteration:
            return None
        complete, self._iteration = self.finish(), iteration
        return complete

    def _forget(self, iteration: int) -> None:
        """A living job goes on after ``iteration``: the one at hand is void, and the tracker was never given it."""
        self._figures, self._iteration = {}, iteration

    def _go_back(self, iteration: int) -> Step | None:
        """A started job goes on after ``iteration``; what was told of later ones is void."""
        if self._iteration > iteration:
            self._figures = {}
        complete, self._iteration = self.finish(), min(self._iteration, iteration)
        return complete


def _own(record: Metrics | ExpertLoad | Evaluation) -> Mapping[str, float]:
    match record:
        case Metrics():
            return record.values
        case ExpertLoad():
            return load_figures(record)
        case Evaluation():
            return {"evaluation_loss": record.loss}
