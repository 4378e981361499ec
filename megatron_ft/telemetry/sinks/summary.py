"""Writes ``summary.json`` with the main figures of the run when the run ends."""

import json
from pathlib import Path

from megatron_ft.durable import replace_file
from megatron_ft.events import Record
from megatron_ft.serde import encode
from megatron_ft.telemetry.sinks.base import Outcome, Sink, SinkContext
from megatron_ft.telemetry.state import RunState

SUMMARY_FILE = "summary.json"


class SummarySink(Sink):
    """Computes the main figures of the run and writes them in one atomic step when the run ends."""

    name = SUMMARY_FILE

    def __init__(self, run_dir: Path, *, world_size: int, state: RunState) -> None:
        self._path = run_dir / SUMMARY_FILE
        self._world_size = world_size
        self._state = state

    @classmethod
    def open(cls, context: SinkContext) -> "SummarySink":
        return cls(context.run_dir, world_size=context.world_size, state=context.state())

    def write(self, record: Record) -> None:
        self._state.take(record)

    def close(self, outcome: Outcome) -> None:
        text = json.dumps(encode(self._figures(outcome)), indent=2, allow_nan=False) + "\n"
        replace_file(self._path, text.encode())

    def _figures(self, outcome: Outcome) -> dict[str, object]:
        # This is the content of the file. ``docs/telemetry.md`` explains each key.
        state = self._state
        return {
            "iterations": state.iteration,
            "first_loss": state.first_loss,
            "final_loss": state.final_loss,
            "evaluation_loss": state.evaluation.loss if state.evaluation else None,
            "evaluation_perplexity": state.evaluation.perplexity if state.evaluation else None,
            "tokens_per_second": state.tokens_per_second,
            "wall_seconds": outcome.time_unix_seconds - state.time_opened_seconds,
            "world_size": self._world_size,
            "exit_code": outcome.exit_code,
            "reason": outcome.reason,
            # The time to compute this figure grows with the run, so it is computed only once, at the end.
            "goodput": state.run.whole_goodput().summary(),
            "skipped": state.num_skipped,
            "resumed_from": state.started.resumed_from if state.started else None,
            "resumed_from_iteration": state.started.resumed_from_iteration if state.started else None,
            "checkpoints": state.checkpoints,
            "failed_sinks": state.failed_sinks,
            "refused_records": state.num_refused_records,
        }
