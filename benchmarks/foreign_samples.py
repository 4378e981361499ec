"""Writes intact dense checkpoints and windows of a run and of similar runs, with known tensors."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_ft.config.identity import JobIdentity, Settings, settings_of
from megatron_ft.config.job import JobConfig
from megatron_ft.mcore.groups import Groups
from megatron_ft.mcore.optimizer.adamw import allocate_state
from megatron_ft.mcore.snapshot.local_window import CONFIG, EXTRAS, PLACEMENT, VOTE
from megatron_ft.mcore.state.tensors import named_state, state_digest
from megatron_ft.mcore.training.trainer import Trainer
from megatron_ft.operators import OperatorId
from megatron_ft.planning.iteration import Vote
from megatron_ft.planning.snapshot.plan import Unit, WindowPlan
from megatron_ft.snapshot.storage.run_settings import SETTINGS
from megatron_ft.snapshot.storage.window_file import write_window
from megatron_ft.testing.stored_samples import sample_window

OWN = "own"
ITERATIONS = (5, 14)
"""Iterations of which every job has a checkpoint and a window."""
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "data": {"data.seed": 4321},
    "model": {"model.moe_aux_loss_coeff": 0.02},
    "optimizer": {"optimizer.weight_decay": 0.2},
    "schedule": {"optimizer.lr": 0.002},
}
"""Overrides of other jobs of the run, by the kind of setting that they change. Tensor shapes stay the same."""
JOBS = (OWN, "run", *OTHERS)
"""Names of all jobs. ``run`` has the random id of another run; everything else is equal to the run's own job."""
_UNITS = [Unit(operator=OperatorId(layer=0, kind="embedding")), Unit(operator=OperatorId(layer=3, kind="head"))]
_PLAN = WindowPlan(slices=((_UNITS[0],), (_UNITS[1],)), interval_iterations=2, reason="by hand")


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Paths and contents of the samples."""

    folder: Path
    """Folder with ``dense/<job>/iter_...`` and ``windows/<job>/window_...``."""
    digests: Mapping[tuple[str, int], str]
    """Digest of the loaded tensors of each dense checkpoint, by job and iteration."""


def identity_of(job: str, own: JobIdentity, config: JobConfig) -> JobIdentity:
    """Return the identity of one of ``JOBS``."""
    if job == "run":
        return replace(own, run_id=own.run_id[::-1])
    if job == OWN:
        return own
    return replace(own, settings=_changed(own.settings, config, OTHERS[job]))


def _changed(settings: Settings, config: JobConfig, values: Mapping[str, Any]) -> Settings:
    for key, value in values.items():
        group, _, name = key.partition(".")
        config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
    fingerprint = settings["data"]["data.fingerprint"] + ("0" if "data.seed" in values else "")
    vocab_size = settings["model"]["model.vocab_size"]
    return settings_of(config, data_fingerprint=fingerprint, vocab_size=vocab_size)


def write_samples(folder: Path, trainer: Trainer, groups: Groups) -> Samples:
    """Save every job's checkpoints and windows below ``folder``. The trainer's state is overwritten."""
    own, digests = trainer.identity, {}
    for job in JOBS:
        trainer.identity = identity_of(job, own, trainer.config)
        manager = trainer.open_checkpoints(groups)
        manager.folder = folder / "dense" / job
        for iteration in ITERATIONS:
            fill(trainer, f"{job} {iteration}")
            trainer.engine.iteration = iteration
            manager.save(trainer.state(trainer.extra_state()), iteration)
            manager.finish()
            digests[job, iteration] = digest_of(trainer)
            _write_window(folder / "windows" / job, job, iteration, trainer)
    trainer.identity = own
    assert len(set(digests.values())) == len(digests), "two samples contain the same tensors"
    return Samples(folder=folder, digests=digests)


def fill(trainer: Trainer, key: str) -> None:
    """Overwrite every weight, master, moment and buffer with numbers that depend on ``key``."""
    generator = torch.Generator().manual_seed(random.Random(key).getrandbits(60))
    allocate_state(trainer.engine.optimizer)
    with torch.no_grad():
        for name, tensor in named_state(trainer.engine.model_chunks, trainer.engine.optimizer):
            if tensor.is_floating_point() and not name.endswith("/step"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator, dtype=torch.float32))


def digest_of(trainer: Trainer) -> str:
    """Return the digest of all current tensors of the trainer."""
    return state_digest(trainer.engine.model_chunks, trainer.engine.optimizer)


def window_payload(job: str, iteration: int) -> tuple[bytes, ...]:
    """Return the bytes of each slice of a job's window. They differ between jobs and between iterations."""
    return sample_window(_seed(job, iteration), 0)[1]


def _seed(job: str, iteration: int) -> int:
    return 1000 * JOBS.index(job) + iteration


def _write_window(folder: Path, job: str, iteration: int, trainer: Trainer) -> None:
    window, payload = sample_window(_seed(job, iteration), 0)
    slices = [
        replace(part, iteration=iteration + index, header={VOTE: json.dumps(_vote(iteration + index))})
        for index, part in enumerate(window.slices)
    ]
    about = {
        EXTRAS: "{}",
        PLACEMENT: "null",
        CONFIG: json.dumps(trainer.replay_config()),
        SETTINGS: json.dumps(trainer.identity.settings),
    }
    slices[0] = replace(slices[0], header={**slices[0].header, **about})
    window = replace(
        window,
        run_id=trainer.identity.run_id,
        world_size=1,
        topology=trainer.topology_record,
        start_iteration=iteration,
        plan=json.loads(json.dumps(_PLAN.to_json())),
        slices=slices,
    )
    write_window(folder, window, [memoryview(content) for content in payload])


def _vote(iteration: int) -> dict[str, object]:
    names = ("loss", "aux_loss", "z_loss", "grad_norm", "clip_coefficient", "loss_scale")
    figures = dict.fromkeys(names, 1.0)
    return Vote(generation=0, iteration=iteration, found_inf=False, num_tokens=64, **figures).to_record()
