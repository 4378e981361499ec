"""The main function of a rank process that an agent started: prepares the process, joins the job, and trains."""

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch

from megatron_ft import failpoints
from megatron_ft.config.job import JobConfig
from megatron_ft.control.node.worker_client import RankContext
from megatron_ft.errors import RankLost, SoftwareError
from megatron_ft.events import FailpointUnfired
from megatron_ft.mcore.device.install import install, take_device

_FAILPOINTS_FILE = "failpoints.jsonl"
_NEEDED_LATER = (
    "scipy.optimize",  # plans migrations after a loss
    "torch._inductor.config",  # torch imports it for deterministic algorithms
    "torch.profiler._cupti_monitor",  # torch imports it at the first step of an optimizer
    "torch.utils.serialization.config",  # torch imports this module and the next one when it saves
    "torch._subclasses.schema_check_mode",
    "encodings.idna",  # Python imports it when it looks up the address of a store
    "megatron_ft.planning.placement.algorithms",  # the configuration names classes of this module and the next ones
    "megatron_ft.planning.snapshot.dense",
    "megatron_ft.planning.snapshot.sparse_window",
)
"""Modules to import at the start of the process. Otherwise a recovery might wait for their import, or fail in it."""


def warm() -> None:
    """Import all modules that a rank on a CPU needs. Call this in the process from which ranks are forked. Import
    nothing if a GPU is visible: Megatron cannot run on a CPU then, and each rank will report this error."""
    from megatron_ft.mcore.device import common, cpu

    if not common.num_visible_gpus():
        with common.answering_for_devices(has_gpu=False):
            _warm(cpu.install)


def warm_cuda() -> None:
    """Import all modules that a rank on a GPU needs, without using CUDA. Call this in the process from which ranks are
    forked.

    Megatron imports Transformer Engine if it is installed, and some versions of Transformer Engine initialise CUDA at
    import. If Transformer Engine is installed, each rank therefore imports Megatron only after the fork.

    Raises:
        SoftwareError: an import initialised CUDA, so forked processes could not use CUDA.
    """
    from megatron_ft.mcore.device import common

    with common.answering_for_devices(has_gpu=True):
        if find_spec("transformer_engine") is None:
            _warm(common.install)
        else:
            _import_needed_later()
    if torch.cuda.is_initialized():
        raise SoftwareError(
            "an imported module initialised CUDA in the fork server, so ranks forked from it could not use CUDA"
        )


def _warm(install_device: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        install_device()
        import_module("megatron_ft.mcore.recovery.coordinator")
        _import_needed_later()


def _import_needed_later() -> None:
    for name in _NEEDED_LATER:
        # Some versions of torch do not have all of these private modules, and then never import them.
        if not name.startswith("torch.") or find_spec(name) is not None:
            import_module(name)


def run_rank(config: JobConfig, context: RankContext) -> bool:
    """Run rank ``context.rank`` of the job until the end of the job. Return whether the run is complete.

    Raises:
        MegatronFtError: the rank failed. The caller ends the process with the ``exit_code`` of the error.
    """
    device, transformer_impl = prepare(config, context)
    from megatron_ft.mcore.data.batches import check_run_data
    from megatron_ft.mcore.recovery.coordinator import Coordinator
    from megatron_ft.mcore.recovery.replicas import ElasticTrainer

    make_trainer = partial(ElasticTrainer, config, device=device, transformer_impl=transformer_impl)
    coordinator = Coordinator(make_trainer, context)
    if not context.is_joining:
        coordinator.trainer.join_job()
    elif config.may_lose_nodes:
        check_run_data(config, coordinator.trainer.samples["train"], context.run_dir)
    coordinator.run()
    report_unfired(context)
    return coordinator.trainer.is_complete


def prepare(config: JobConfig, context: RankContext) -> tuple[torch.device, str]:
    """Prepare this process for training: arm failpoints, select the device, import Megatron and the trainer.

    Returns:
        The rank's device, and the ``transformer_impl`` of ``ElasticTrainer``.
    """
    _arm_failpoints(config, context)
    # Megatron and torch warn about calls in their own code, which a user cannot change.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.c10d_logger")
    # Select the device before ``install`` imports Transformer Engine, which may initialise CUDA on the current device.
    device = take_device(config, node=context.node, local_rank=context.local_rank)
    _, transformer_impl = install(config)
    _prepare_process(config)
    if context.is_joining:
        _check_kernels(config)
    with warnings.catch_warnings():
        # Megatron warns at import about each missing optional package. ``device.install`` has checked them already.
        warnings.simplefilter("ignore")
        import_module("megatron_ft.mcore.recovery.coordinator")
        _import_needed_later()
    return device, transformer_impl


def _arm_failpoints(config: JobConfig, context: RankContext) -> None:
    # Each hit is written to disk before it is sent to the sinks, because the fault may end this process.
    write = failpoints.append_to(context.run_dir / _FAILPOINTS_FILE)

    def record(hit: failpoints.Record) -> None:
        write(hit)
        names = ("action", "phase", "iteration", "rank", "node", "failpoint")
        context.worker.report({"kind": "failpoint_hit", **{name: hit[name] for name in names}})

    generation = context.generation + int(context.is_joining)  # a joining rank trains from the next generation
    failpoints.arm(
        config.testing.failpoints, rank=context.rank, node=context.node, generation=generation, record=record
    )


def _check_kernels(config: JobConfig) -> None:
    """Build the kernels of a joining rank before other ranks wait for it.

    Raises:
        RankLost: the kernels cannot be built or run on this machine. This error ends only the rank, and its node does
            not join. Any other error would count as a failure of the rank. If the membership has begun, such a failure
            ends the job.
    """
    from megatron_ft.mcore.moe.placement_manager import open_dispatch
    from megatron_ft.planning.compilers import kernels_of
    from megatron_ft.runtime.dispatch import extension

    update = "optimizer.update_backend"
    try:
        if config.placement.algorithm is not None:
            open_dispatch(config)
        # The kernels of the update depend only on ``optimizer.update_backend``, so ``cpu`` is right for a GPU, too.
        if (kernels := kernels_of(config, "cpu").get(update)) is not None:
            extension.load(kernels, update)
    except SoftwareError as error:
        raise RankLost(f"this node cannot join: {' '.join(str(error).split())}") from None


def report_unfired(context: RankContext) -> None:
    """Report failpoints that were not reached. Otherwise a test without an injected fault would seem to succeed."""
    for failpoint in failpoints.unfired():
        unfired = FailpointUnfired(failpoint=failpoint.text, rank=context.rank, node=context.node)
        context.worker.report(unfired.to_record())


def _prepare_process(config: JobConfig) -> None:
    torch.set_num_threads(config.training.num_threads)
    if config.training.deterministic:
        # planning/rank_environment.py has set the environment variables that cuBLAS and Transformer Engine also need.
        torch.use_deterministic_algorithms(True, warn_only=False)
        # Filling new tensors with a fixed value costs time, and would hide reads of uninitialized memory.
        torch.utils.deterministic.fill_uninitialized_memory = False
