"""One rank's part of a window that is restored, and its replay into a dense state."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.state.operator_view import OperatorView
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.recovery.replay import ReplayPlan, plan_replay
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.snapshot.storage.rejected_windows import window_digest
from megatron_ft.snapshot.window import Window

EXTRAS, PLACEMENT, CONFIG, VOTE, PLAN = "extras", "placement", "config", "vote", "plan_in_force"
"""Entries of a slice's header beside ``SETTINGS``, as JSON text, because a manifest is strict JSON without NaN."""

_REPLAYED_GROUPS = ("model", "parallel", "optimizer", "precision", "training")
_REPLAYED_PLACEMENT = ("algorithm", "num_slots_per_rank", "shares")
_OF_THE_RUN = ("exit_at_iteration", "eval_interval_iterations", "eval_iterations", "digest_interval_iterations")
"""Keys of ``training`` that do not affect the results of iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWindow:
    """One rank's part of the window from which the job continues; every byte is verified."""

    window: Window
    slices: tuple[memoryview, ...]
    """The bytes of each slice."""
    stored: StoredWindow
    """Origin of the bytes. ``where`` is ``own`` only if ``buffer`` is in this rank's present memory. Otherwise
    ``buffer`` is the buffer of that memory that must not be overwritten yet, with its newest committed window."""

    @property
    def plan(self) -> WindowPlan:
        """Plan of the window."""
        return WindowPlan.from_json(self.window.plan)

    @property
    def plan_in_force(self) -> WindowPlan:
        """Plan of the windows after it: the same plan, unless the window was captured whole after a recovery."""
        content = self.header(0, PLAN)
        return self.plan if content is None else WindowPlan.from_json(content)

    @property
    def digest(self) -> str:
        """Checksum of this rank's part."""
        return window_digest([self.window.to_bytes().decode()])

    def header(self, index: int, name: str) -> Any:
        """Read the value under ``name`` in the header of slice ``index``; None without one."""
        text = self.window.slices[index].header.get(name)
        return None if text is None else json.loads(text)

    def replay_plan(self, *, until: int | None = None, votes: Mapping[int, Vote] | None = None) -> ReplayPlan:
        """Plan its replay into a dense state.

        Args:
            until: last iteration to run again; None for the window's last.
            votes: votes of the iterations after the window.

        Raises:
            RecoveryError: plan, votes or extras are missing or cannot be read.
        """
        start, where = self.window.start_iteration, f"window of iteration {self.window.start_iteration}"
        try:
            logged = [Vote.from_record(self.header(index, VOTE)) for index in range(self.window.num_slices)]
            known = {**(votes or {}), **{vote.iteration: vote for vote in logged}}
            replay = plan_replay(self.plan, start, known, until=until)
            extras = self.header(0, EXTRAS)
            self.header(0, PLACEMENT)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise RecoveryError(f"{where}: plan or headers cannot be read: {error!r}") from error
        num_slices = sum(step.load is not None for step in replay.steps)
        if num_slices != self.window.num_slices or not isinstance(extras, dict):
            raise RecoveryError(
                f"{where}: its replay plan has {num_slices} slices and the window {self.window.num_slices}, or "
                "slice 0 has no train state"
            )
        return replay

    def problem_in(self, view: OperatorView) -> str | None:
        """Return the reason why the window cannot be loaded into the model and optimizer of ``view``; None if it
        can."""
        for index, part in enumerate(self.window.slices):
            if part.pieces != view.pieces(self.plan, index):
                start = self.window.start_iteration
                return f"slice {index} of window {start} was captured with other element ranges than this rank has now"
        return None


def replay_config(config: JobConfig, fingerprint: str, *, device: str, transformer_impl: str) -> dict[str, Any]:
    """Collect the keys that determine the results of an iteration, dotted, with their values; for the data its
    fingerprint.

    A window can only be replayed with the values with which it was captured.

    Args:
        device: ``cpu`` or ``cuda``: the resolved ``training.device``.
        transformer_impl: ``local`` or ``transformer_engine``: the resolved ``training.transformer_impl``.
    """
    groups = to_dict(config)
    groups["training"] |= {"device": device, "transformer_impl": transformer_impl}
    # Another backend sums in another order.
    groups["parallel"]["device_backend"] = config.parallel.backend_on(device)
    placement = {f"placement.{name}": groups["placement"][name] for name in _REPLAYED_PLACEMENT}
    return {"data": fingerprint, **placement} | {
        f"{group}.{name}": value
        for group in _REPLAYED_GROUPS
        for name, value in groups[group].items()
        if not (group == "training" and name in _OF_THE_RUN)
    }
