"""Trains with engines that were built without connections, for ``tests/distributed/test_prebuilt.py``."""

from typing import Any

import torch.distributed as dist

from megatron_ft.mcore.groups import Groups, dissolve_groups
from megatron_ft.mcore.state.tensors import free_state
from megatron_ft.testing import engines
from tests.helpers.volatile import volatile_state


def train(
    *, rank: int, world_size: int, store: dist.Store, overrides: dict[str, Any], has_moved: bool
) -> dict[str, Any]:
    """Build two stages offline, train with one of them, and train with an engine that was built on connected groups.

    Args:
        has_moved: whether the engine is built for the other rank of the stage and then moved to this rank.

    Returns:
        Digests before and after training and losses of both engines, and whether the optimizer was built again.
    """
    config = engines.micro_config(overrides, world_size=world_size)
    first = rank ^ 1 if has_moved else rank
    about: dict[str, Any] = {"world_size": world_size, "timeout_seconds": 60}
    built = []
    for place in ((first + 2) % world_size, first):
        groups = Groups.form_offline(config.parallel, rank=place, **about)
        engine = engines.new_engine(config)
        engine.build(groups, is_offline=True)
        built.append((engine, groups.put_away()))
    assert not dist.is_initialized(), "the groups are not put away"
    (other, _), (engine, away) = built
    free_state(other.model_chunks, other.optimizer)
    groups = away.put_back()
    if has_moved:
        groups = groups.move(config.parallel, rank=rank, **about)
    groups = groups.reconnect(store=dist.PrefixStore("prebuilt", store), generation=1)
    has_built = engine.use_built(groups, engine.group_keys, has_moved=has_moved)
    found = _train(engine)
    engine.teardown()
    del groups, away, built
    dissolve_groups()
    with engines.engine_of(config, store=store, rank=rank, world_size=world_size, generation=2) as reference:
        return {"found": found, "expected": _train(reference), "has_built": has_built}


def _train(engine: Any) -> dict[str, Any]:
    before = engines.digests(engine)
    losses = [engine.run_iteration(number).vote.loss for number in (1, 2, 3)]
    return {"before": before, "losses": losses, "after": {**engines.digests(engine), **volatile_state(engine)}}
