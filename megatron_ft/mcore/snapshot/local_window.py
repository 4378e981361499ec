"""``LocalWindow``: one rank's part of a window that its state is to come from, and how it becomes that state."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.optimizer.operator_view import OperatorView
from megatron_ft.planning.commit import Vote
from megatron_ft.planning.recovery.localized import KeptWindow
from megatron_ft.planning.recovery.replay import ReplayPlan, plan_replay
from megatron_ft.planning.snapshot.plan import WindowPlan
from megatron_ft.snapshot.storage.rejected_windows import window_digest
from megatron_ft.snapshot.window import WindowManifest

EXTRAS, PLACEMENT, CONFIG, VOTE, PLAN = "extras", "placement", "config", "vote", "plan_in_force"
SETTINGS = "settings"
"""What the header of a slice holds, as JSON text: NaN and the like are no JSON of the manifest's kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPart:
    """What a rank knows of its part of the newest committed window."""

    window: KeptWindow
    num_slices: int
    buffer: int | None
    """Buffer of this rank's arena that must not be overwritten yet; None without."""
    is_in_arena: bool
    """Whether that buffer holds the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalWindow:
    """This rank's part of the window the job continues from: every byte verified."""

    manifest: WindowManifest
    slices: tuple[memoryview, ...]
    is_in_arena: bool
    """Whether this rank's own memory holds it."""
    buffer: int | None
    """Buffer of this rank's arena that must not be overwritten yet: its newest committed window's; None without."""

    @property
    def plan(self) -> WindowPlan:
        """The plan it was captured by."""
        return WindowPlan.from_json(self.manifest.plan)

    @property
    def kept(self) -> "KeptPart":
        """It, as long as no newer one is committed."""
        window = KeptWindow(start_iteration=self.manifest.start_iteration, generation=self.manifest.generation)
        slices = self.manifest.num_slices
        return KeptPart(window=window, num_slices=slices, buffer=self.buffer, is_in_arena=self.is_in_arena)

    @property
    def plan_in_force(self) -> WindowPlan:
        """The plan of the windows after it: its own, unless it was captured whole after a recovery."""
        content = self.header(0, PLAN)
        return self.plan if content is None else WindowPlan.from_json(content)

    @property
    def resumed(self) -> tuple[KeptPart, WindowPlan]:
        """What capturing goes on with."""
        return self.kept, self.plan_in_force

    @property
    def digest(self) -> str:
        """What this rank's part contains."""
        return window_digest([self.manifest.to_bytes().decode()])

    def header(self, index: int, name: str) -> Any:
        """What the header of slice ``index`` says under ``name``; None if nothing."""
        text = self.manifest.slices[index].header.get(name)
        return None if text is None else json.loads(text)

    def replay_plan(self, *, until: int | None = None, votes: Mapping[int, Vote] | None = None) -> ReplayPlan:
        """How it becomes a dense state.

        Args:
            until: last iteration to run again; None for the window's last.
            votes: of iterations behind the window.

        Raises:
            RecoveryError: plan, votes or extras are missing or cannot be read.
        """
        start, where = self.manifest.start_iteration, f"window of iteration {self.manifest.start_iteration}"
        try:
            logged = [Vote.from_record(self.header(index, VOTE)) for index in range(self.manifest.num_slices)]
            known = {**(votes or {}), **{vote.iteration: vote for vote in logged}}
            replay = plan_replay(self.plan, start, known, until=until)
            extras = self.header(0, EXTRAS)
            self.header(0, PLACEMENT)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise RecoveryError(f"{where}: plan or headers cannot be read: {error!r}") from error
        num_slices = sum(step.load is not None for step in replay.steps)
        if num_slices != self.manifest.num_slices or not isinstance(extras, dict):
            raise RecoveryError(f"{where}: its plan has {num_slices} slices, or slice 0 has no extras")
        return replay


def other_pieces(view: OperatorView, window: LocalWindow) -> str | None:
    """What is wrong where the window's pieces are not those of this model and optimizer."""
    for index, record in enumerate(window.manifest.slices):
        captured = [piece.to_json()[:-1] for piece in record.pieces]
        if captured != [piece.to_row() for piece in view.pieces(window.plan, index)]:
            return (
                f"slice {index} of window {window.manifest.start_iteration} was captured from other ranges of the state"
            )
    return None
