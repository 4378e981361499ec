"""The life of a rank process: prepares the process, joins the job, trains, leaves."""

import warnings
from collections.abc import Callable
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
    "scipy.optimize",  # migrations after a loss are planned with it
    "torch._inductor.config",  # torch imports it where algorithms are to be deterministic
    "torch.profiler._cupti_monitor",  # and this one at the first step of an optimizer
    "torch.utils.serialization.config",  # and these when it saves
    "torch._subclasses.schema_check_mode",
    "encodings.idna",  # Python looks up the address of a store with it
    "megatron_ft.planning.placement.algorithms",  # the configuration names them
    "megatron_ft.planning.snapshot.dense",
    "megatron_ft.planning.snapshot.sparse_window",
)
"""Modules that would otherwise be imported at their first use. A recovery must neither wait for an import nor fail in
one."""


def warm() -> None:
    """Import everything that a rank on a CPU needs, in the process from which ranks are forked.

    If a GPU is visible, nothing is imported, because the ranks will report that and end.
    """
    from megatron_ft.mcore.device import common, cpu

    if not common.num_visible_gpus():
        with common.answering_for_devices(has_gpu=False):
            _warm(cpu.install)


def warm_cuda() -> None:
    """Import everything that a rank on CUDA needs, in the process from which ranks are forked. CUDA is not initialised.

    If Transformer Engine is installed, Megatron would import it, and versions of it ask the driver for its devices.
    Then the ranks import Megatron themselves.

    Raises:
        SoftwareError: an import initialised CUDA, which a forked process cannot do again.
    """
    from megatron_ft.mcore.device import common

    with common.answering_for_devices(has_gpu=True):
        if find_spec("transformer_engine") is None:
            _warm(common.install)
        else:
            _import_needed_later()
    if torch.cuda.is_initialized():
        raise SoftwareError("an import initialised CUDA, so ranks cannot be forked from this process")


def _warm(install_device: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        install_device()
        import_module("megatron_ft.mcore.recovery.coordinator")
        _import_needed_later()


def _import_needed_later() -> None:
    for name in _NEEDED_LATER:
        # Private modules of torch are not in every version: what is not there is not imported later, either.
        if not name.startswith("torch.") or find_spec(name) is not None:
            import_module(name)


def run_rank(config: JobConfig, context: RankContext) -> None:
    """Run rank ``context.rank`` of the job, from start to end.

    Raises:
        MegatronFtError: a subclass, whose exit code the process ends with.
    """
    _arm_failpoints(config, context)
    # Useless in a rank's log: warnings about Megatron's and torch's own calls.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.c10d_logger")
    # First of all: what looks for Transformer Engine may touch CUDA, which then takes memory of the device in use.
    device = take_device(config, node=context.node, local_rank=context.local_rank)
    device_type, transformer_impl = install(config)
    _prepare_process(config)
    if context.is_joining:
        _check_kernels(config)
    with warnings.catch_warnings():
        # Megatron warns at import about every optional package; device.software has checked them.
        warnings.simplefilter("ignore")
        from megatron_ft.mcore.data.data_checks import check_run_data, note_run_data
        from megatron_ft.mcore.groups import join, open_store
        from megatron_ft.mcore.recovery.coordinator import run_memberships
        from megatron_ft.mcore.recovery.scripted import ScriptedHistory
        from megatron_ft.mcore.training.trainer import Trainer

        _import_needed_later()
    trainer = Trainer(config, context, device=device, transformer_impl=transformer_impl)
    store = None
    if not context.is_joining:
        timeout_seconds = config.launch.start_timeout_seconds
        store = open_store(context, timeout_seconds=timeout_seconds)
        trainer.build(join(trainer.config, context, device=device_type, timeout_seconds=timeout_seconds, store=store))
        # After ``build``, in which ranks have compared their data: joining ranks compare theirs with this.
        if context.rank == 0 and config.may_lose_nodes:
            note_run_data(trainer.samples["train"], context.run_dir)
    elif config.may_lose_nodes:
        check_run_data(config, trainer.samples["train"], context.run_dir)
    history = ScriptedHistory(config, context, store)
    # The history keeps the store where memberships follow: another reference would keep it open for the whole run.
    del store
    run_memberships(trainer, history)
    _report_unfired(context)


def _arm_failpoints(config: JobConfig, context: RankContext) -> None:
    # Arm failpoints; each hit is written to disk first and then sent to the sinks, because the fault may end this
    # process.
    write = failpoints.append_to(context.run_dir / _FAILPOINTS_FILE)

    def record(hit: failpoints.Record) -> None:
        write(hit)
        names = ("action", "phase", "iteration", "rank", "node", "failpoint")
        context.worker.report({"kind": "failpoint_hit", **{name: hit[name] for name in names}})

    generation = context.generation + int(context.is_joining)  # it begins with the next membership
    failpoints.arm(
        config.testing.failpoints, rank=context.rank, node=context.node, generation=generation, record=record
    )


def _check_kernels(config: JobConfig) -> None:
    """Build the kernels of a joining rank before others wait for it.

    Raises:
        RankLost: they cannot be built or run here. A reported error would end the job if the membership has begun in
            the meantime; an exit ends only this node's attempt to join.
    """
    if config.placement.algorithm is None:
        return
    from megatron_ft.mcore.moe.placement_manager import open_dispatch

    try:
        open_dispatch(config)
    except SoftwareError as error:
        raise RankLost(f"this node cannot join: {' '.join(str(error).split())}") from None


def _report_unfired(context: RankContext) -> None:
    # Report failpoints that were not reached: a trial without its fault must not count as survived.
    for failpoint in failpoints.unfired():
        unfired = FailpointUnfired(failpoint=failpoint.text, rank=context.rank, node=context.node)
        context.worker.report(unfired.to_record())


def _prepare_process(config: JobConfig) -> None:
    torch.set_num_threads(config.training.num_threads)
    if config.training.deterministic:
        # What cuBLAS and Transformer Engine want besides is in the environment already (planning/rank_environment.py).
        torch.use_deterministic_algorithms(True, warn_only=False)
        # Filling fresh memory hides reads of it and costs time; nothing here reads what it has not written.
        torch.utils.deterministic.fill_uninitialized_memory = False
