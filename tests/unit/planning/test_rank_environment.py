"""Tests the environment of ranks by device, backend and layout."""

from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict
from megatron_ft.planning.rank_environment import rank_environment, set_otherwise

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
SAME_SUMS = {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0", "NCCL_PROTO": "Simple"}
ALWAYS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def job(*, device: str = "cuda", deterministic: bool = False, **groups: Any) -> JobConfig:
    return from_dict({"training": {"device": device, "deterministic": deterministic}, **groups})


def test_a_cpu_needs_nothing() -> None:
    assert rank_environment(job(device="cpu", deterministic=True)) == {}


def test_the_same_bits_need_a_fixed_order_of_sums() -> None:
    assert rank_environment(job()) == ALWAYS
    assert rank_environment(job(deterministic=True)) == {**ALWAYS, **DETERMINISTIC, **SAME_SUMS}
    gloo = {"device_backend": "gloo"}
    assert rank_environment(job(deterministic=True, parallel=gloo)) == {**ALWAYS, **DETERMINISTIC}


def test_communication_that_overlaps_with_computation_is_queued_before_it() -> None:
    split = {"tensor_model_parallel_size": 2}
    assert rank_environment(job(parallel=split)) == {**ALWAYS, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_ranks_that_share_a_gpu_are_hosts_of_their_own_for_nccl() -> None:
    shared = job(launch={"ranks_per_gpu": 2})
    of_ranks = [rank_environment(shared, rank) for rank in range(3)]
    assert [found["NCCL_HOSTID"] for found in of_ranks] == ["rank-0", "rank-1", "rank-2"]
    assert all(found[f"NCCL_{name}_DISABLE"] == "1" for found in of_ranks for name in ("P2P", "SHM", "IB"))
    assert "NCCL_HOSTID" not in rank_environment(shared)


def test_a_job_that_outlives_losses_keeps_its_processes_when_a_communicator_fails() -> None:
    elastic = rank_environment(job(launch={"num_nodes": 2}, recovery={"min_nodes": 1, "keep_processes": True}))
    assert elastic["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0" and elastic["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in rank_environment(job())
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in rank_environment(job(recovery={"keep_layout": True}))


def test_variables_that_the_user_has_set_are_named() -> None:
    table = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    assert set_otherwise(table, {"NCCL_ALGO": "Tree", "NCCL_PROTO": "Simple", "HOME": "/"}) == {"NCCL_ALGO": "Tree"}
    assert set_otherwise(table, {}) == {}
