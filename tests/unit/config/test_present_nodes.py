"""Tests the configuration for the nodes that train at present."""

from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import config_of
from megatron_ft.config.serialize import from_dict

SPREAD = {"_target_": "megatron_ft.planning.placement.spread.Spread"}


def job(**topology: object) -> JobConfig:
    return from_dict(
        {
            "launch": {"num_nodes": 3, "ranks_per_node": 2},
            "topology": topology,
            "parallel": {"use_distributed_optimizer": False},
            "placement": {"algorithm": SPREAD, "num_slots_per_rank": 4, "min_replicas": 3},
            "snapshot": {"num_peer_copies": 2},
        }
    )


def test_fewer_nodes_keep_their_names_and_have_as_many_copies_as_can_be() -> None:
    config = config_of(job(), (0, 0, 2, 2))
    assert (config.launch.num_nodes, config.topology.failure_domains) == (2, ["node0", "node2"])
    assert config.parallel.expert_model_parallel_size == 4
    assert (config.placement.num_slots_per_rank, config.placement.min_replicas) == (4, 2)
    assert config.snapshot.num_peer_copies == 1


def test_nodes_that_came_later_have_names_too() -> None:
    config = config_of(job(), (1, 1, 2, 2, 7, 7))
    assert config.topology.failure_domains == ["node1", "node2", "node7"]
    assert (config.placement.min_replicas, config.snapshot.num_peer_copies) == (3, 2)
    named = config_of(job(failure_domains=["a", "b", "a", "c"]), (0, 0, 2, 2, 3, 3))
    assert named.topology.failure_domains == ["a", "a", "c"]
    assert (named.placement.min_replicas, named.snapshot.num_peer_copies) == (2, 1)
