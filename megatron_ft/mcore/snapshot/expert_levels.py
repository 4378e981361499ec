"""Recovery from two levels, memory and storage: takes experts from memory if their state is newer there than in a file.

A job continues from a file (persisted window) if the memory of some ranks is lost. The file can have older states of
some experts than of the rest of the model. Other ranks may still have newer states of these experts in memory
(MoC-System, section 5.1). An expert is taken from memory only if all ranks with parts of it have the same state there.
This state must not be from after the file's iteration: otherwise the expert would train on some tokens twice.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ft.errors import RecoveryError
from megatron_ft.mcore.groups import Collectives
from megatron_ft.mcore.snapshot.local_window import AT_RISK, EXTRAS, LocalWindow
from megatron_ft.mcore.state.train_state import TrainState
from megatron_ft.operators import operator_of
from megatron_ft.planning.snapshot.lost_tokens import Rows
from megatron_ft.snapshot.window import Slice, Window

Expert = tuple[int, int]
"""Key of an expert: the index of its MoE layer among all MoE layers, as in ``TokenLedger``, and the expert's id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertState:
    """Version of an expert's state on one level (memory or storage) of one rank."""

    iteration: int
    """Iteration after which this state of the expert was captured."""
    processed: int
    """Number of tokens that the expert had processed at the end of this iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLevels:
    """Experts of which a rank has parts, and the versions of their states in the file and in the rank's memory."""

    stored: Mapping[Expert, int]
    """Iteration after which the state in the file was captured, for each expert of which the rank has a part."""
    in_memory: Mapping[Expert, tuple[ExpertState, ...]]
    """Versions of each expert's state in the rank's memory, for the experts in ``stored``. There can be several."""

    def to_json(self) -> list[Any]:
        """Convert to JSON values: a row for each expert."""
        return [
            [*expert, at, [[state.iteration, state.processed] for state in self.in_memory.get(expert, ())]]
            for expert, at in sorted(self.stored.items())
        ]

    @classmethod
    def from_json(cls, content: Sequence[Any]) -> "RankLevels":
        """Create the object from the result of ``to_json``."""
        stored, in_memory = {}, {}
        for row, number, at, states in content:
            stored[row, number] = at
            in_memory[row, number] = tuple(ExpertState(iteration=one, processed=tokens) for one, tokens in states)
        return cls(stored=stored, in_memory=in_memory)


def newest_states(by_rank: Sequence[RankLevels], start: int) -> dict[Expert, ExpertState]:
    """Choose the experts that are taken from memory, and the version of each. This is the newest version that all ranks
    with parts of the expert have. It must be newer than the version in the file, but not newer than ``start``.

    Args:
        by_rank: levels of each rank, in rank order.
        start: iteration of the file from which the job continues.
    """
    chosen: dict[Expert, ExpertState] = {}
    for expert in sorted({expert for levels in by_rank for expert in levels.stored}):
        holders = [levels for levels in by_rank if expert in levels.stored]
        common = set(holders[0].in_memory.get(expert, ()))
        for levels in holders[1:]:
            common &= set(levels.in_memory.get(expert, ()))
        stored_at = holders[0].stored[expert]
        usable = [state for state in common if stored_at < state.iteration <= start]
        if usable:
            chosen[expert] = max(usable, key=lambda state: state.iteration)
    return chosen


def take_newer_experts(
    window: LocalWindow, in_memory: Sequence[tuple[Window, memoryview]], collectives: Collectives
) -> LocalWindow:
    """Return ``window``, which was read from a file, with newer states of experts from memory. All ranks must call
    this.

    Args:
        window: this rank's part of the file; its bytes are changed.
        in_memory: windows in memory with this rank's state, and their bytes. Their hashes must have been verified.

    Raises:
        RecoveryError: the train state of a window cannot be read on some rank; nothing has changed on any rank.
    """
    (part,), lost = window.window.slices, window.at_risk
    assert lost is not None, "the file has all experts of its iteration"
    places = _left_out(window, part)
    stored = {expert: part.iteration_of(indices[0]) for expert, indices in places.items()}
    sources: dict[tuple[Expert, int], memoryview] = {}
    states: dict[Expert, list[ExpertState]] = {}
    error, processed = None, ()
    try:
        processed = _processed(window.window)
        for other, payload in in_memory:
            (held,) = other.slices
            known, at_risk = _processed(other), _at_risk(other)
            for expert, indices in places.items():
                iterations = {held.iteration_of(index) for index in indices}
                if held.pieces != part.pieces or len(iterations) > 1:
                    continue
                (iteration,) = iterations
                # The window's state of an expert lacks the tokens that a recovery from this window would lose.
                row, number = expert
                risk = 0 if at_risk is None else at_risk[row][number]
                states.setdefault(expert, []).append(
                    ExpertState(iteration=iteration, processed=known[row][number] - risk)
                )
                sources[expert, iteration] = payload
    except (KeyError, TypeError, ValueError) as failure:
        error = f"the train state of a window cannot be read: {failure!r}"
    if (error := collectives.errors(error)) is not None:
        raise RecoveryError(error)
    mine = RankLevels(stored=stored, in_memory={expert: tuple(found) for expert, found in states.items()})
    by_rank = [RankLevels.from_json(levels) for levels in collectives.gather(mine.to_json())]
    chosen = newest_states(by_rank, part.iteration)
    if not chosen:
        return window
    captured_at = [part.iteration_of(index) for index in range(len(part.pieces))]
    (content,) = window.slices
    for expert, state in chosen.items():
        for index in places.get(expert, ()):
            piece = part.pieces[index]
            content[piece.offset : piece.end] = sources[expert, state.iteration][piece.offset : piece.end]
            captured_at[index] = state.iteration
    left = tuple(
        tuple(
            processed[row][number] - chosen[row, number].processed if (row, number) in chosen else tokens
            for number, tokens in enumerate(tokens_of_layer)
        )
        for row, tokens_of_layer in enumerate(lost)
    )
    changed = replace(
        part,
        captured_at=tuple(captured_at),
        hashes=part.hash_pieces(content),
        header={**part.header, AT_RISK: json.dumps(left)},
    )
    return replace(window, window=replace(window.window, slices=[changed]), from_memory=frozenset(chosen))


def _left_out(window: LocalWindow, part: Slice) -> dict[Expert, list[int]]:
    """Return, by expert, the indices of pieces that the window copied from an earlier window."""
    operators = [unit.operator for unit in window.plan.active(0)]
    layers = sorted({operator.layer for operator in operators if operator.expert is not None})
    row_of = {layer: row for row, layer in enumerate(layers)}
    found: dict[Expert, list[int]] = {}
    for index, piece in enumerate(part.pieces):
        if not part.is_captured(index):
            operator = operator_of(piece.parameter, max(layers, default=0))
            assert operator.expert is not None, f"{piece.parameter} is from an earlier iteration but no expert"
            found.setdefault((row_of[operator.layer], operator.expert), []).append(index)
    return found


def _processed(window: Window) -> Rows:
    tokens = TrainState.from_json(json.loads(window.slices[0].header[EXTRAS])).history.tokens
    if tokens is None:
        raise ValueError(f"window {window.start_iteration}: has no counts of the tokens that experts received")
    return tokens.processed


def _at_risk(window: Window) -> list[list[int]] | None:
    text = window.slices[0].header.get(AT_RISK)
    return None if text is None else json.loads(text)
