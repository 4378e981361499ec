"""One rank's part of a window that is restored, and the plan of its replay."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.state.operator_view import OperatorView
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.recovery.replay import ReplayPlan
from megatron_ft.planning.recovery.sources import StoredWindow
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.snapshot.storage.rejected_windows import window_digest
from megatron_ft.snapshot.window import Window

EXTRAS, PLACEMENT, CONFIG, VOTE, PLAN = "extras", "placement", "config", "vote", "plan_in_force"
"""Names of entries in a slice's header, besides ``SETTINGS``. Values are JSON texts, because a manifest is strict JSON
and cannot contain NaN."""

_REPLAYED_GROUPS = ("model", "parallel", "optimizer", "precision", "training")
_REPLAYED_PLACEMENT = ("algorithm", "num_slots_per_rank", "shares")
_OF_THE_RUN = ("exit_at_iteration", "eval_interval_iterations", "eval_iterations", "digest_interval_iterations")
"""Keys of ``training`` that do not affect the results of iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWindow:
    """One rank's part of the window from which the job continues. The checksums of all bytes have been verified."""

    window: Window
    slices: tuple[memoryview, ...]
    """The bytes of each slice."""
    stored: StoredWindow
    """Origin of the bytes. If ``where`` is ``own``, the window is in ``buffer`` of this rank's memory on its node.
    Otherwise ``buffer`` contains this rank's newest committed window in that memory, which must not be overwritten
    yet."""

    @property
    def plan(self) -> WindowPlan:
        """Plan with which this window was captured."""
        return WindowPlan.from_json(self.window.plan)

    @property
    def plan_in_force(self) -> WindowPlan:
        """Plan of the windows after this one. It differs from ``plan`` if this window was captured as one slice after
        a recovery."""
        content = self.header(0, PLAN)
        return self.plan if content is None else WindowPlan.from_json(content)

    @property
    def digest(self) -> str:
        """Checksum of this rank's part of the window."""
        return window_digest([self.window.to_bytes().decode()])

    def header(self, index: int, name: str) -> Any:
        """Return the value of ``name`` in the header of slice ``index``, or None if the header does not have it."""
        text = self.window.slices[index].header.get(name)
        return None if text is None else json.loads(text)

    def replay_plan(self, *, until: int | None = None, votes: Mapping[int, Vote] | None = None) -> ReplayPlan:
        """Plan the replay that turns this window into the complete state after one iteration.

        Args:
            until: last iteration to run again; None for the last iteration of the window.
            votes: votes of the iterations after the window.

        Raises:
            RecoveryError: the plan, a vote or the train state is missing or cannot be read.
        """
        start, where = self.window.start_iteration, f"window of iteration {self.window.start_iteration}"
        try:
            logged = [Vote.from_record(self.header(index, VOTE)) for index in range(self.window.num_slices)]
            known = {**(votes or {}), **{vote.iteration: vote for vote in logged}}
            replay = ReplayPlan.of(self.plan, start, known, until=until)
            extras = self.header(0, EXTRAS)
            self.header(0, PLACEMENT)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise RecoveryError(f"{where}: its plan or a slice's header cannot be read: {error!r}") from error
        num_slices = sum(step.load is not None for step in replay.steps)
        if num_slices != self.window.num_slices or not isinstance(extras, dict):
            raise RecoveryError(
                f"{where}: its plan has {num_slices} slices but the window has {self.window.num_slices}, or the header "
                "of slice 0 has no train state"
            )
        return replay

    def problem_in(self, view: OperatorView) -> str | None:
        """Return why this window cannot be loaded into the model and optimizer of ``view``, or None if it can."""
        for index, part in enumerate(self.window.slices):
            if part.pieces != view.pieces(self.plan, index):
                start = self.window.start_iteration
                return (
                    f"window of iteration {start}: slice {index} was captured with other element ranges than this rank "
                    "has now"
                )
        return None


def replay_config(config: JobConfig, fingerprint: str, *, device: str, transformer_impl: str) -> dict[str, Any]:
    """Return the configuration that determines the results of an iteration: dotted keys with their values, and under
    ``data`` the fingerprint of the data.

    A window can only be replayed with the values with which it was captured.

    Args:
        device: ``cpu`` or ``cuda``: the resolved ``training.device``.
        transformer_impl: ``local`` or ``transformer_engine``: the resolved ``training.transformer_impl``.
    """
    groups = to_dict(config)
    groups["training"] |= {"device": device, "transformer_impl": transformer_impl}
    # Included because the order of sums depends on the backend.
    groups["parallel"]["device_backend"] = config.parallel.backend_on(device)
    placement = {f"placement.{name}": groups["placement"][name] for name in _REPLAYED_PLACEMENT}
    return {"data": fingerprint, **placement} | {
        f"{group}.{name}": value
        for group in _REPLAYED_GROUPS
        for name, value in groups[group].items()
        if not (group == "training" and name in _OF_THE_RUN)
    }
