"""Tests the coordinator of a rank: refused devices, failed memberships and abandoned saves."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.config.serialize import from_dict
from megatron_ft.errors import ConfigError, RankLost
from megatron_ft.mcore.recovery.coordinator import Coordinator
from megatron_ft.mcore.recovery.replicas import ElasticTrainer
from tests.helpers.keys import grouped


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"min_nodes": 1}, r"recovery\.min_nodes=1"),
        ({"max_nodes": 3}, r"nodes\.max_nodes=3"),
        ({"num_spare_nodes": 1}, r"nodes\.num_spare_nodes=1"),
        ({"keep_layout": True}, r"recovery\.keep_layout=true"),
    ],
    ids=str,
)
def test_no_rank_is_lost_on_a_device_whose_connections_stay(keys: dict[str, Any], why: str) -> None:
    job = from_dict(grouped(num_nodes=2, **keys))
    trainer = SimpleNamespace(job=job, engine=SimpleNamespace(iteration=0), device=SimpleNamespace(type="cuda"))
    with pytest.raises(ConfigError, match=rf"^{why}.* cannot be used with training.device=cuda"):
        _coordinator(trainer)._check()


def _coordinator(trainer: Any) -> Coordinator:
    return Coordinator(lambda context: trainer, SimpleNamespace())  # type: ignore[arg-type]


def _failing(error: BaseException) -> Any:
    """Make a rank that raises ``error`` when it first forms a membership and succeeds the second time. Return what it
    reported."""
    output: list[Any] = []
    errors = [error]

    def reconfigure(following: Any) -> None:
        trainer.context.generation = following.generation
        if errors:
            raise errors.pop()

    def survive(position: Any, failure: str) -> Any:
        output.append((position.generation, position.has_state, failure.strip().splitlines()[-1]))
        return _membership(3)

    worker = SimpleNamespace(can_survive=True, survive=survive)
    trainer = SimpleNamespace(
        context=SimpleNamespace(worker=worker, generation=1, rank=0, node=0, local_rank=0),
        hang_up=lambda _: None,
        reconfigure=reconfigure,
        membership_start=SimpleNamespace(has_state=False, is_formed=False),
    )
    assert _coordinator(trainer)._form(_membership(2))
    return output


def _membership(generation: int, rank: int | None = 0) -> Any:
    """Return a membership in which the process of the test has ``rank``; None for a hot spare."""
    target = SimpleNamespace(iteration=4)
    return SimpleNamespace(generation=generation, target=target, rank_on=lambda node, local_rank: rank)


@pytest.mark.parametrize("last", [_membership(4), None], ids=["rank", "leaves"])
def test_a_hot_spare_waits_for_a_membership_in_which_it_has_a_rank(last: Any) -> None:
    calls: list[tuple[str, int]] = []
    awaited = [last, _membership(3, None)]
    worker = SimpleNamespace(can_survive=True, stand_by=lambda: awaited.pop())
    trainer = SimpleNamespace(
        context=SimpleNamespace(worker=worker, node=1, local_rank=0),
        reconfigure=lambda following: calls.append(("rank", following.generation)),
        stand_by=lambda following: calls.append(("spare", following.generation)),
    )
    assert _coordinator(trainer)._form(_membership(2, None)) == (last is not None)
    assert calls == [("spare", 2), ("spare", 3), *([] if last is None else [("rank", 4)])]


def test_a_broken_collective_leads_to_the_next_membership() -> None:
    """A rank that has not received its state reports this."""
    assert _failing(RuntimeError("Connection closed by peer")) == [
        (2, False, "RuntimeError: Connection closed by peer")
    ]


@pytest.mark.parametrize(
    "error",
    [
        ImportError("The scipy install you are using seems to be broken"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=str,
)
def test_a_rank_whose_own_process_fails_is_lost_alone(error: Exception) -> None:
    with pytest.raises(RankLost, match="cannot continue in generation 2: "):
        _failing(error)


def _trainer_with_a_save_due(*, saves: list[bool]) -> Any:
    """Make a rank of generation 1 whose saves fail where ``saves`` is False."""

    def save() -> None:
        if not saves.pop(0):
            raise RuntimeError("Connection closed by peer")

    trainer = object.__new__(ElasticTrainer)
    vars(trainer).update(
        is_save_due=True,
        save=save,
        run=lambda: None,
        collectives=SimpleNamespace(any=lambda flag: flag),
        context=SimpleNamespace(generation=1, worker=SimpleNamespace(can_survive=True)),
    )
    return trainer


def test_an_abandoned_save_is_due_until_another_has_begun() -> None:
    saves = [False, True]
    trainer = _trainer_with_a_save_due(saves=saves)
    coordinator = _coordinator(trainer)
    assert "Connection closed by peer" in (coordinator._attempt() or "")
    assert trainer.is_save_due
    assert coordinator._attempt() is None and not trainer.is_save_due
    assert coordinator._attempt() is None and saves == []
