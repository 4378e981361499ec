"""``PartialWindows``: keeps records of windows that leave out experts: the iteration of each expert's state in every
window in memory and in the newest file, and the number of tokens that a recovery from there would lose."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ft.operators import operator_of
from megatron_ft.planning.snapshot.demand import Demand
from megatron_ft.planning.snapshot.expert_choice import Counts
from megatron_ft.planning.snapshot.lost_tokens import Rows, TokenLedger, mean_share
from megatron_ft.planning.snapshot.partial_experts import ChoiceBasis, ExpertBytes, ExpertPolicy, StorageBasis
from megatron_ft.planning.snapshot.plan import MAX_PARTIAL_FILES, UPDATED_COMPONENTS, Piece, WindowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Index of each piece's expert in the flattened array ``[MoE layers, experts]``."""

    pieces: Sequence[Piece]
    left_out: Counts
    """Index of the expert for each piece that a window may leave out; -1 for other pieces."""
    masters: Counts
    """Index of the expert for each piece of an expert's master weights; -1 for other pieces."""


class PartialWindows:
    """Chooses the experts that each window captures, and those that are written to the window's file on storage.
    Records, by window and expert, the iteration of the expert's state.

    All ranks make the same calls with the same values, so they have the same records.

    Args:
        planned_tokens: tokens that the router assigns in one layer in the whole training.
    """

    def __init__(self, policy: ExpertPolicy, plan: WindowPlan, demand: Demand, planned_tokens: int) -> None:
        assert plan.partial is not None, "the plan captures all experts"
        self._policy = policy
        self._plan = plan
        self._components = frozenset(plan.partial.components)
        self.sends_gradients = plan.partial.sends_gradients
        """Whether peers compute an expert's state from gradients if the previous iteration's window has captured it."""
        self._state = ExpertBytes.of(demand, plan.partial.components)
        self._row_of = {layer: row for row, layer in enumerate(self._state.layers)}
        self._planned_tokens = planned_tokens
        self._captured_at: dict[int, Counts] = {}
        """Iteration after which each expert's state in a window was captured, ``[MoE layers, experts]``, by
        window's start."""
        self._processed: dict[int, Counts] = {}
        """Tokens that each expert had processed after an iteration, for each iteration in ``_captured_at``."""
        self._stored_at: Counts | None = None
        """Iteration after which each expert's state in the newest file was captured, ``[MoE layers, experts]``; None
        before the first file. A file that is still being written counts too."""
        self._stored_start = self._whole_start = -1
        """Starts of two windows: the window of the newest file, and the window of the newest complete file. A complete
        file has the whole content of its window."""
        self._num_files = 0
        self._written_in: Counts = np.zeros((), dtype=np.int64)
        """Number of the file, counted from 0, in which each expert's state was written: ``[MoE layers, experts]``."""
        self.writes_all_pieces = False
        """Whether the newest file contains all pieces of its window, although earlier files have some of them."""
        self.stored_share: float | None = None
        """Share of the planned tokens that a recovery from the newest file would lose; None if it is not known."""
        self._places: _Places | None = None

    def replan(self, plan: WindowPlan) -> bool:
        """Use ``plan`` for the next windows if they can copy experts from the windows of the present plan. Return
        whether they can: both plans must have the same slices, and leave out the same components."""
        partial = plan.partial
        if partial is None or plan.slices != self._plan.slices or self._components != frozenset(partial.components):
            return False
        self._plan, self.sends_gradients = plan, partial.sends_gradients
        return True

    @property
    def _num_persisted_experts(self) -> int | None:
        # Plans that an earlier version of the program made have no ``num_persisted_experts``.
        planned = None if self._plan.partial is None else self._plan.partial.num_persisted_experts
        return planned or self._policy.num_persisted_experts

    def begin(self, start: int, held: Collection[int], ledger: TokenLedger, loads: Sequence[Rows]) -> None:
        """Choose the experts of a window. If no window in ``held`` has the state of the other experts, choose all.

        Args:
            held: start iterations of the windows in memory.
            loads: for each recent iteration, the number of tokens of each expert, [layer of the model][expert].
        """
        earlier = max((iteration for iteration in self._captured_at if iteration in held), default=None)
        now = np.array(ledger.processed, dtype=np.int64)
        if earlier is None:
            captured_at = np.full(now.shape, start, dtype=np.int64)
        else:
            before = self._captured_at[earlier]
            basis = ChoiceBasis(
                number=start // self._plan.interval_iterations,
                at_risk=now - self._processed_at(before),
                iteration_loads=np.mean([self._of_layers(rows) for rows in loads] or [now * 0], axis=0),
                lost_share=ledger.lost_share(self._planned_tokens),
                planned_tokens=self._planned_tokens,
                budget_bytes=None if self._plan.basis is None else self._plan.basis.budget_bytes,
            )
            captured_at = np.where(self._policy.choose(self._plan, basis, self._state), start, before)
        known = {**self._captured_at, start: captured_at}
        self._captured_at = {
            iteration: at for iteration, at in known.items() if iteration in held or iteration == start
        }
        self._processed[start] = now
        kept = [*self._captured_at.values(), *([] if self._stored_at is None else [self._stored_at])]
        needed = {iteration for at in kept for iteration in np.unique(at).tolist()}
        self._processed = {iteration: rows for iteration, rows in self._processed.items() if iteration in needed}

    def begin_whole(self, start: int, ledger: TokenLedger) -> None:
        """Record a window that captures all experts."""
        self._captured_at = {}
        self.begin(start, (), ledger, ())

    def store(self, start: int, ledger: TokenLedger, unwritten_start: int) -> bool:
        """Choose the experts whose state in window ``start`` is written to the file of the window. The file refers to
        earlier files for the state of all other experts. Return whether the snapshot server needs a description of
        the file, because its content differs from that of the window, or because the file ``writes_all_pieces``.

        At most ``MAX_PARTIAL_FILES`` later files may refer to an expert's state in this file; or 2 n files, if n files
        are needed to write every expert once and 2 n is larger. The next file contains all pieces. So a damaged file
        makes at most this number of later files unusable.

        Args:
            unwritten_start: start of the newest window whose file some rank could not write; -1 if there is none. Files
                since then may refer to pieces that are not on storage, so the next file has its window's whole content.
        """
        before, captured_at = self._stored_at, self._captured_at.get(start)
        since, self._stored_start, self._stored_at = self._stored_start, start, captured_at
        number, self._num_files = self._num_files, self._num_files + 1
        persisted, num_experts = self._num_persisted_experts, self._state.num_experts
        # Twice: until all experts are written, a policy that depends on loads needs more files than one with turns.
        most = max(MAX_PARTIAL_FILES, 2 * num_experts // (persisted or num_experts))
        is_overdue = number - self._written_in.min() > most
        writes_all = persisted is None or unwritten_start >= self._whole_start or is_overdue
        self.writes_all_pieces = False
        if captured_at is None or before is None or writes_all:
            self._whole_start = start
            self.stored_share = None if captured_at is None else self._share(self._lost(start, captured_at))
            if captured_at is None or before is None or is_overdue:
                self._written_in = np.full((), number)
                # The snapshot server writes all pieces of a window that has captured all experts, or of a first window.
                self.writes_all_pieces = bool(is_overdue and captured_at is not None and (captured_at != start).any())
            else:
                self._written_in = np.where(captured_at == before, self._written_in, number)
            return self.writes_all_pieces
        now = self._processed_at(np.full_like(captured_at, start))
        basis = StorageBasis(
            captured_at=captured_at,
            stored_at=before,
            since=since,
            at_risk=now - self._processed_at(captured_at),
            stored_at_risk=now - self._processed_at(before),
            lost_share=ledger.lost_share(self._planned_tokens),
            planned_tokens=self._planned_tokens,
            num_groups=self._state.num_groups,
            num_experts=persisted,
        )
        self._stored_at = np.where(self._policy.choose_stored(basis), captured_at, before)
        self._written_in = np.where(self._stored_at == before, self._written_in, number)
        self.stored_share = self._share(self._lost(start, self._stored_at))
        is_whole = bool((self._stored_at == captured_at).all())
        self._whole_start = start if is_whole else self._whole_start
        return not is_whole

    def captured_at(self, start: int, pieces: Sequence[Piece], num_layers: int) -> tuple[int, ...] | None:
        """Return, for each piece of window ``start``, the iteration of its state; None if this is ``start`` for all."""
        captured_at = self._captured_at[start]
        if (captured_at == start).all():
            return None
        return self._of_pieces(captured_at, start, pieces, num_layers)

    def stored(self, start: int, pieces: Sequence[Piece], num_layers: int) -> tuple[tuple[int, ...], Rows]:
        """Return two values for the file of window ``start``, for which ``store`` was just called: the iteration of
        each piece, and the tokens that a recovery from this file would lose, as [MoE layer][expert]."""
        assert self._stored_at is not None and self._stored_start == start, f"window {start} is not stored"
        return self._of_pieces(self._stored_at, start, pieces, num_layers), self._lost(start, self._stored_at)

    def captured_again(self, start: int, pieces: Sequence[Piece], num_layers: int) -> list[int]:
        """Return the indices in ``pieces`` of the master weights of those experts that were captured in the window
        ``start`` and also in the window that started one iteration earlier."""
        before, now = self._captured_at.get(start - 1), self._captured_at[start]
        if before is None:
            return []
        again = ((before == start - 1) & (now == start)).reshape(-1)
        places = self._places_of(pieces, num_layers)
        found: list[int] = np.flatnonzero((places.masters >= 0) & again[places.masters]).tolist()
        return found

    def _of_pieces(self, captured_at: Counts, start: int, pieces: Sequence[Piece], num_layers: int) -> tuple[int, ...]:
        places = self._places_of(pieces, num_layers).left_out
        return tuple(np.where(places < 0, start, captured_at.reshape(-1)[places]).tolist())

    def _places_of(self, pieces: Sequence[Piece], num_layers: int) -> _Places:
        # Computed only once for each layout of pieces, because this call delays training.
        if self._places is None or self._places.pieces is not pieces:
            experts, components = np.full(len(pieces), -1), np.array([piece.component for piece in pieces])
            for index, piece in enumerate(pieces):
                operator = operator_of(piece.parameter, num_layers)
                if operator.expert is not None:
                    experts[index] = self._row_of[operator.layer] * self._state.num_experts + operator.expert
            self._places = _Places(
                pieces=pieces,
                left_out=np.where(np.isin(components, list(self._components)), experts, -1),
                masters=np.where(components == UPDATED_COMPONENTS[0], experts, -1),
            )
        return self._places

    def at_risk(self, start: int) -> Rows | None:
        """Return the tokens that a recovery from window ``start`` would lose, as [MoE layer][expert]. Return None for a
        window that is not known."""
        if start not in self._captured_at:
            return None
        return self._lost(start, self._captured_at[start])

    def _lost(self, start: int, captured_at: Counts) -> Rows:
        lost = self._processed_at(np.full_like(captured_at, start)) - self._processed_at(captured_at)
        return tuple(tuple(row) for row in lost.tolist())

    def shares(self, start: int, ledger: TokenLedger) -> tuple[float | None, float]:
        """Return two shares of the planned tokens: the share that a recovery from window ``start`` would lose (None for
        a window that is not known), and the share that earlier recoveries have lost."""
        at_risk = self.at_risk(start)
        return None if at_risk is None else self._share(at_risk), ledger.lost_share(self._planned_tokens)

    def owed_share(self, ledger: TokenLedger) -> float:
        """Return the lost tokens that experts have not yet offset by extra tokens, as a share of the planned tokens."""
        return self._share(ledger.owed())

    def _share(self, tokens: Rows) -> float:
        return mean_share(tokens, self._planned_tokens)

    def _of_layers(self, rows: Rows) -> Counts:
        return np.array([rows[layer - 1] for layer in self._state.layers], dtype=np.int64)

    def _processed_at(self, captured_at: Counts) -> Counts:
        found = np.zeros_like(captured_at)
        for iteration in np.unique(captured_at).tolist():
            found = np.where(captured_at == iteration, self._processed[iteration], found)
        return found
