"""Choice of the device that a job trains on, from the facts that ``doctor/devices.py`` collects about a machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.config.launch import LaunchConfig
from megatron_ft.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Facts about NVIDIA's driver and the installed PyTorch, found without importing PyTorch."""

    has_driver: bool
    """Whether ``/dev/nvidiactl`` exists."""
    driver: str
    """Version of the driver; empty if unknown."""
    num_gpus: int
    """Device files that this process can open; a container may have only some of them."""
    visible: str | None = None
    """``CUDA_VISIBLE_DEVICES``; None if it is not set."""
    torch_has_cuda: bool = True
    """Whether the installed PyTorch is built for CUDA; True if unknown."""
    gpu_memory_bytes: int | None = None
    """Memory of the smallest GPU; None if it was not queried or the driver did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """Device of a plan, and the reason for it."""

    device: str
    """``cpu`` or ``cuda``."""
    is_certain: bool
    """Whether the device is certain; not with ``auto`` in a plan for an unknown machine, where ranks may use the other
    one."""
    reason: str


def usable_gpus(facts: DeviceFacts) -> int:
    """Return the number of GPUs that PyTorch can use; an invalid entry of ``CUDA_VISIBLE_DEVICES`` hides those after
    it."""
    if not facts.has_driver or not facts.torch_has_cuda:
        return 0
    if facts.visible is None:
        return facts.num_gpus
    num_named = 0
    for name in facts.visible.split(","):
        # CUDA ignores everything from the first invalid entry on (CUDA C++ Programming Guide, environment variables).
        if not name.strip() or name.strip().startswith("-"):
            break
        num_named += 1
    # A container may have fewer device files than the variable names.
    return min(facts.num_gpus, num_named)


def node_on_host(launch: LaunchConfig, node: int) -> int:
    """Index of ``node`` among the nodes of its machine, from 0.

    Nodes of launcher ``local`` share the machine of the command; other launchers put one node on each machine.
    """
    return node if launch.mode == "local" and launch.node_launcher == "local" else 0


def device_index(
    *, node_on_host: int, local_rank: int, ranks_per_node: int, num_visible: int, ranks_per_gpu: int = 1
) -> int:
    """Index of a rank's GPU among the GPUs that are visible to its process.

    The ranks of all nodes of a machine take its GPUs in order. A process with one visible GPU takes that one: the
    launcher has bound it (``srun --gpus-per-task=1``).

    Args:
        node_on_host: index of the rank's node among the nodes of its machine.
        local_rank: index of the rank on its node.
        num_visible: GPUs that are visible to the process.
        ranks_per_gpu: ranks that share one GPU.

    Raises:
        ConfigError: the process has too few visible GPUs for this rank.
    """
    if num_visible == 1:
        return 0
    place = node_on_host * ranks_per_node + local_rank
    index = place // ranks_per_gpu
    if index >= num_visible:
        constraint = (
            f"must be larger, or the machine must have more GPUs: rank {place} of this machine needs GPU {index}, and "
            f"{num_visible} are visible"
        )
        raise ConfigError.of("launch.ranks_per_gpu", ranks_per_gpu, constraint)
    return index


def gpus_needed(num_ranks: int, ranks_per_gpu: int) -> int:
    """Number of GPUs that ``num_ranks`` ranks of one machine use."""
    return -(-num_ranks // ranks_per_gpu)


def choose_device(
    requested: str,
    facts: DeviceFacts,
    *,
    gpu_memory_bytes: int | None,
    refused: Mapping[str, str],
    may_be_elsewhere: bool,
) -> DeviceChoice:
    """Resolve ``training.device``.

    Args:
        requested: value of the key.
        facts: facts about this machine.
        gpu_memory_bytes: ``limits.gpu_memory_bytes``; a value means that the job is for GPUs.
        refused: reason why each possible device refuses the configuration; empty if it accepts it.
        may_be_elsewhere: whether ranks may run on other machines (a dry run), whose devices are unknown here.

    Raises:
        ConfigError: the device refuses the configuration, or the job is for GPUs and this machine has none.
    """
    if requested != "auto":
        _check_accepted(refused[requested])
        return DeviceChoice(device=requested, is_certain=True, reason=f"training.device={requested}")
    num_gpus = usable_gpus(facts)
    if num_gpus:
        reason = f"training.device=auto found {num_gpus} GPU{'' if num_gpus == 1 else 's'} here"
        _check_accepted(refused["cuda"], reason)
        return DeviceChoice(device="cuda", is_certain=True, reason=reason)
    # The job is meant for GPUs: to train it on CPU because none is found here would be a silent fallback.
    if gpu_memory_bytes is not None:
        if not may_be_elsewhere:
            constraint = "must be cpu, and limits.gpu_memory_bytes null, on a machine without a usable GPU: "
            raise ConfigError.of("training.device", "auto", constraint + _why_no_gpu(facts))
        reason = "training.device=auto with limits.gpu_memory_bytes given"
        _check_accepted(refused["cuda"], reason)
        return DeviceChoice(device="cuda", is_certain=True, reason=reason)
    reason = f"training.device=auto found no GPU here: {_why_no_gpu(facts)}"
    # A plan for an unknown machine prefers the device that accepts the job; a start has only this machine's.
    if not may_be_elsewhere or not refused["cpu"] or refused["cuda"]:
        _check_accepted(refused["cpu"], reason)
        return DeviceChoice(device="cpu", is_certain=not may_be_elsewhere, reason=reason)
    return DeviceChoice(
        device="cuda", is_certain=False, reason=f"{reason}; on cpu this job would be refused: {refused['cpu']}"
    )


def other_device(choice: DeviceChoice, refused: Mapping[str, str]) -> str:
    """Describe the job on the device that was not chosen; empty if ranks cannot use it."""
    if choice.is_certain:
        return ""
    other = "cuda" if choice.device == "cpu" else "cpu"
    if refused[other]:
        return f"on {other} this job would be refused before it starts: {refused[other]}"
    return (
        f"on {other} this job would also be accepted, with the same cost of losses; the plan shows memory for "
        f"{choice.device} only"
    )


def _check_accepted(refusal: str, reason: str = "") -> None:
    if refusal:
        raise ConfigError(f"{refusal} ({reason})" if reason else refusal)


def _why_no_gpu(facts: DeviceFacts) -> str:
    if not facts.has_driver or not facts.num_gpus:
        return "no driver or no GPU was found"
    if not facts.torch_has_cuda:
        return "the installed PyTorch is built without CUDA"
    return f"CUDA_VISIBLE_DEVICES={facts.visible} hides them"
