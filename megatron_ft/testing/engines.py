"""Builds small training engines for tests, from tiny configurations and generated samples, in one process or in
several forked ranks.

``python -m megatron_ft.testing.engines SPEC OUTCOME`` is the process that ``run_scenarios`` starts. It imports Megatron
once, then forks the ranks of one scenario after the other.
"""

import contextlib
import gc
import importlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ft.config.job import JobConfig
from megatron_ft.config.validate import validate

REPOSITORY = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 64
_generations = itertools.count()


class MadeUpSamples:
    """Generated samples. A sample depends only on its index, and repeats a short pattern that a model can learn."""

    eod = 0

    def __init__(self, seq_length: int) -> None:
        self.seq_length = seq_length

    def sample(self, index: int) -> np.ndarray:
        """Return the tokens of sample ``index``: int64 [seq_length + 1]."""
        pattern = np.random.default_rng(index).integers(0, VOCAB_SIZE, size=4)
        return np.resize(pattern, self.seq_length + 1).astype(np.int64)


def micro_config(overrides: Mapping[str, Any] | None = None, *, world_size: int = 1) -> JobConfig:
    """Return a valid configuration of a tiny MoE model. ``overrides`` maps keys such as ``model.num_layers`` to
    values."""
    config = JobConfig()
    small = {
        "model.num_layers": 2,
        "model.hidden_size": 32,
        "model.num_attention_heads": 4,
        "model.seq_length": 16,
        "model.ffn_hidden_size": 64,
        "model.moe_ffn_hidden_size": 64,
        "model.num_moe_experts": 4,
        "model.make_vocab_size_divisible_by": VOCAB_SIZE,
        "training.micro_batch_size": 1,
        "training.global_batch_size": 4,
        "training.train_iterations": 20,
        "training.device": "cpu",
        "optimizer.lr_warmup_iterations": 1,
        "optimizer.lr": 1e-2,
        "optimizer.min_lr": 1e-3,
        "launch.ranks_per_node": world_size,
    }
    for key, value in {**small, **(overrides or {})}.items():
        group, name = key.split(".")
        assert hasattr(getattr(config, group), name), key
        setattr(getattr(config, group), name, value)
    validate(config)
    return config


def install() -> None:
    """Prepare this process to use Megatron on the CPU."""
    from megatron_ft.mcore.device import cpu

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpu.install()
        importlib.import_module("megatron_ft.mcore.training.engine")
        importlib.import_module("megatron_ft.mcore.groups")


def be_ready_to_fork() -> None:
    """Prepare this process to fork ranks: import modules that ranks import late, and exclude existing objects from
    garbage collection. A collection in a forked rank would write to the objects, and the kernel would copy them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch._dynamo", "scipy.optimize"):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def groups_of(
    config: JobConfig, *, store: Any = None, rank: int = 0, world_size: int = 1, generation: int | None = None
) -> Iterator[Any]:
    """Form the process groups of one generation (set of ranks), and dissolve them after the block. The default
    ``store`` works only within one process."""
    import torch.distributed as dist

    from megatron_ft.mcore.groups import Groups, dissolve_groups

    groups = Groups.form(
        config.parallel,
        store=dist.HashStore() if store is None else store,
        rank=rank,
        world_size=world_size,
        generation=next(_generations) if generation is None else generation,
        device="cpu",
        timeout_seconds=60,
    )
    try:
        yield groups
    finally:
        del groups
        dissolve_groups()


def new_engine(config: JobConfig) -> Any:
    """Return a ``TrainingEngine`` on the CPU with generated samples. Its method ``build`` has not been called."""
    import torch

    from megatron_ft.mcore.training.engine import TrainingEngine

    samples = MadeUpSamples(config.model.seq_length)
    return TrainingEngine(
        config,
        device=torch.device("cpu"),
        transformer_impl="local",
        vocab_size=VOCAB_SIZE,
        samples={"train": samples, "valid": samples},
    )


@contextlib.contextmanager
def engine_of(
    config: JobConfig, *, store: Any = None, rank: int = 0, world_size: int = 1, generation: int | None = None
) -> Iterator[Any]:
    """Yield a built ``TrainingEngine``. After the block, tear the engine down and dissolve its process groups."""
    with groups_of(config, store=store, rank=rank, world_size=world_size, generation=generation) as groups:
        engine = new_engine(config)
        engine.build(groups)
        del groups
        try:
            yield engine
        finally:
            engine.teardown()


def add_padding(engine: Any, multiple: int) -> None:
    """Make ``engine`` add padding microbatches, so that each rank has a multiple of ``multiple`` microbatches."""
    import dataclasses

    engine.batch = dataclasses.replace(engine.batch, num_microbatches_multiple=multiple)


def digests(engine: Any) -> dict[str, str]:
    """Return the digest of every tensor of a rank's state, by name."""
    from megatron_ft.mcore.state.tensors import tensor_digests

    return tensor_digests(engine.model_chunks, engine.optimizer)


# -- several ranks ----------------------------------------------------------------------------------------


def run_scenarios(
    scenarios: Mapping[str, tuple[str, int, Mapping[str, Any]]], *, timeout_seconds: float = 170.0
) -> dict[str, list[Any]]:
    """Run test scenarios, one after the other, in forked ranks. Map the name of each to the results of its ranks.

    Args:
        scenarios: name -> (``module:function``, world size, keyword arguments). Each rank calls the function with these
            arguments and ``rank``, ``world_size`` and ``store``. The result of the function must be a JSON value.

    Raises:
        AssertionError: a rank raised an exception; the message contains its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-ft-") as folder:
        spec, outcome = Path(folder, "spec.json"), Path(folder, "outcome.json")
        spec.write_text(json.dumps(scenarios))
        result = subprocess.run(
            [sys.executable, "-m", "megatron_ft.testing.engines", str(spec), str(outcome)],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
        assert result.returncode == 0, result.stderr[-6000:]
        outcomes: dict[str, list[Any]] = json.loads(outcome.read_text())
    return outcomes


def of_ranks(outcomes: Mapping[str, list[Any]], name: str) -> list[Any]:
    """Return the results of the ranks of scenario ``name``, in rank order. If ranks raised exceptions, fail with the
    exception of the first of them."""
    errors = [rank["error"] for rank in outcomes[name] if isinstance(rank, dict) and "error" in rank]
    assert not errors, f"{name}: {errors[0]}"
    return outcomes[name]


def _run_rank(entry: str, rank: int, world_size: int, folder: str, arguments: dict[str, Any]) -> None:
    import torch.distributed as dist

    try:
        module, function = entry.split(":")
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        result = getattr(importlib.import_module(module), function)(
            rank=rank, world_size=world_size, store=store, **arguments
        )
    except BaseException:  # noqa: BLE001 - handed to the test, whatever it is
        result = {"error": traceback.format_exc()}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


def _run_scenario(entry: str, world_size: int, arguments: dict[str, Any]) -> list[Any]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="megatron-ft-") as folder:
        ranks = [
            context.Process(target=_run_rank, args=(entry, rank, world_size, folder, arguments))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout=80)
        outcome = []
        for rank, process in enumerate(ranks):
            if process.is_alive():
                process.kill()
                process.join()
            file = Path(folder, f"{rank}.json")
            missing = {"error": f"rank {rank} ended with exit code {process.exitcode} and returned no result"}
            outcome.append(json.loads(file.read_text()) if file.exists() else missing)
    return outcome


def _main(spec: str, outcome: str) -> None:
    install()
    be_ready_to_fork()
    outcomes = {name: _run_scenario(*job) for name, job in json.loads(Path(spec).read_text()).items()}
    Path(outcome).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    _main(*sys.argv[1:])


__all__: Sequence[str] = (
    "MadeUpSamples",
    "add_padding",
    "be_ready_to_fork",
    "digests",
    "engine_of",
    "groups_of",
    "install",
    "micro_config",
    "new_engine",
    "of_ranks",
    "run_scenarios",
)
