"""What a rank finds out only when it knows its device."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ft.config.serialize import from_dict
from megatron_ft.errors import ConfigError, RankLost
from megatron_ft.mcore.recovery import coordinator
from tests.helpers.keys import grouped

LOSE = "lose(nodes=[1],before_iteration=5)"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"min_nodes": 1}, r"recovery\.min_nodes=1"),
        ({"max_nodes": 3}, r"nodes\.max_nodes=3"),
        ({"num_spare_nodes": 1}, r"nodes\.num_spare_nodes=1"),
        ({"keep_layout": True}, r"recovery\.keep_layout=true"),
        ({"membership_schedule": [LOSE]}, r"testing\.membership_schedule=\['lose"),
    ],
    ids=str,
)
def test_no_rank_is_lost_on_a_device_whose_connections_stay(keys: dict[str, Any], why: str) -> None:
    job = from_dict(grouped(num_nodes=2, **keys))
    trainer = SimpleNamespace(job=job, engine=SimpleNamespace(iteration=0), device=SimpleNamespace(type="cuda"))
    with pytest.raises(ConfigError, match=rf"^{why}.*: must not be set with training.device=cuda"):
        coordinator._check(trainer, SimpleNamespace(next=None))  # type: ignore[arg-type]


def _failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rank whose first re-formation raises ``error`` and whose second one forms; what it said in between."""
    said: list[Any] = []
    errors = [error]

    def reconfigure(trainer: Any, following: Any, *, store: Any) -> None:
        trainer.context.generation = following.generation
        if errors:
            raise errors.pop()

    def survive(position: Any, failure: str) -> Any:
        said.append((position.generation, position.has_state, failure.strip().splitlines()[-1]))
        return SimpleNamespace(generation=3, target=SimpleNamespace(iteration=4))

    monkeypatch.setattr(coordinator, "reconfigure", reconfigure)
    worker = SimpleNamespace(can_survive=True, survive=survive)
    trainer = SimpleNamespace(
        context=SimpleNamespace(worker=worker, generation=1, rank=0),
        hang_up=lambda _: None,
        membership_start=SimpleNamespace(has_state=False),
    )
    following = SimpleNamespace(generation=2, target=SimpleNamespace(iteration=4))
    formed: list[int] = []
    history = SimpleNamespace(store=None, formed=lambda: formed.append(trainer.context.generation))
    coordinator._form(trainer, following, history)  # type: ignore[arg-type]
    assert formed == [3]
    return said


def test_a_broken_collective_leads_to_the_next_membership(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has not been given its state says so."""
    assert _failing(RuntimeError("Connection closed by peer"), monkeypatch) == [
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
def test_a_rank_whose_own_process_fails_is_lost_alone(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankLost, match="this rank cannot join generation 2: "):
        _failing(error, monkeypatch)


def _trainer_with_a_save_due(*, saves: list[bool]) -> Any:
    """A rank of generation 1 whose saves break, one after the other, where ``saves`` has False."""

    def save() -> None:
        if not saves.pop(0):
            raise RuntimeError("Connection closed by peer")

    return SimpleNamespace(
        is_save_due=True,
        save=save,
        run=lambda before: None,
        collectives=SimpleNamespace(any=lambda flag: flag),
        context=SimpleNamespace(generation=1, worker=SimpleNamespace(can_survive=True)),
    )


def test_an_abandoned_save_is_due_until_another_has_begun() -> None:
    saves = [False, True]
    trainer = _trainer_with_a_save_due(saves=saves)
    assert "Connection closed by peer" in (coordinator._attempt(trainer, None) or "")
    assert trainer.is_save_due
    assert coordinator._attempt(trainer, None) is None and not trainer.is_save_due
    assert coordinator._attempt(trainer, None) is None and saves == []
