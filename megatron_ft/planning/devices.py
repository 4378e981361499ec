"""Which device a job trains on, decided from facts about a machine. ``doctor/devices.py`` observes the facts."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.config.launch import LaunchConfig
from megatron_ft.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What NVIDIA's driver and the installed PyTorch show, without importing PyTorch."""

    has_driver: bool
    """Whether ``/dev/nvidiactl`` exists."""
    driver: str
    """Its version, empty where it does not say."""
    num_gpus: int
    """Device files that this process could open: a container may have some of them only."""
    visible: str | None = None
    """``CUDA_VISIBLE_DEVICES``; None where it is not set."""
    torch_has_cuda: bool = True
    """Whether the installed PyTorch is built for CUDA; True where that is not known."""
    gpu_memory_bytes: int | None = None
    """Memory of the smallest GPU; None where it was not asked for or the driver does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """The device that a plan is made for."""

    device: str
    """``cpu`` or ``cuda``."""
    is_certain: bool
    """Whether ranks cannot take the other device: false for ``auto`` in a plan for a machine that is not known."""
    reason: str
    """Why this device, for people."""


def usable_gpus(facts: DeviceFacts) -> int:
    """GPUs that PyTorch would find: an entry of ``CUDA_VISIBLE_DEVICES`` that is not valid hides those after it."""
    if not facts.has_driver or not facts.torch_has_cuda:
        return 0
    if facts.visible is None:
        return facts.num_gpus
    num_named = 0
    for name in facts.visible.split(","):
        if not name.strip() or name.strip().startswith("-"):
            break
        num_named += 1
    return min(facts.num_gpus, num_named)


def node_on_host(launch: LaunchConfig, node: int) -> int:
    """Place of ``node`` among the nodes of its machine, from 0.

    Nodes that the command starts on its own machine share it; all other launchers put one node on a machine.
    """
    return node if launch.mode == "local" and launch.node_launcher == "local" else 0


def device_index(
    *, node_on_host: int, local_rank: int, ranks_per_node: int, num_visible: int, ranks_per_gpu: int = 1
) -> int:
    """The GPU that a rank takes, as PyTorch counts those that its process sees.

    The ranks of a machine are numbered through its nodes and take one GPU after the other. A process that sees one GPU
    takes that one: the launcher has bound it (``srun --gpus-per-task=1``).

    Args:
        node_on_host: place of the rank's node among the nodes of its machine.
        local_rank: place of the rank on its node.
        num_visible: GPUs that the process sees.
        ranks_per_gpu: ranks that share one GPU.

    Raises:
        ConfigError: the process sees no GPU, or too few for a rank of this place.
    """
    if num_visible == 1:
        return 0
    place = node_on_host * ranks_per_node + local_rank
    index = place // ranks_per_gpu
    if index >= num_visible:
        constraint = f"needs GPU {index} for rank {place} of this machine, whose process sees {num_visible}"
        raise ConfigError.of("launch.ranks_per_gpu", ranks_per_gpu, constraint)
    return index


def gpus_needed(num_ranks: int, ranks_per_gpu: int) -> int:
    """GPUs that ``num_ranks`` ranks of one machine take."""
    return -(-num_ranks // ranks_per_gpu)


def choose_device(
    requested: str,
    facts: DeviceFacts,
    *,
    gpu_memory_bytes: int | None,
    refused: Mapping[str, str],
    may_be_elsewhere: bool,
) -> DeviceChoice:
    """Decide ``training.device``.

    Args:
        requested: the key's value.
        facts: of the machine that asks.
        gpu_memory_bytes: ``launch.gpu_memory_bytes``: who gives it means a job on GPUs.
        refused: by possible device the reason why it refuses the configuration, empty where it does not.
        may_be_elsewhere: the ranks may run on other machines than the one that asks (a dry run). A machine without a
            GPU says nothing about those then.

    Raises:
        ConfigError: the device refuses the configuration, or GPUs are meant and this machine has none.
    """
    if requested != "auto":
        _check_accepted(refused[requested])
        return DeviceChoice(device=requested, is_certain=True, reason=f"training.device={requested}")
    num_gpus = usable_gpus(facts)
    if num_gpus:
        reason = f"training.device=auto found {num_gpus} GPU{'' if num_gpus == 1 else 's'} here"
        _check_accepted(refused["cuda"], reason)
        return DeviceChoice(device="cuda", is_certain=True, reason=reason)
    if gpu_memory_bytes is not None:
        if not may_be_elsewhere:
            constraint = "must be cpu where no GPU can be used: launch.gpu_memory_bytes is given, and "
            raise ConfigError.of("training.device", "auto", constraint + _why_no_gpu(facts))
        reason = "training.device=auto with launch.gpu_memory_bytes given"
        _check_accepted(refused["cuda"], reason)
        return DeviceChoice(device="cuda", is_certain=True, reason=reason)
    reason = f"training.device=auto found no GPU here: {_why_no_gpu(facts)}"
    if not may_be_elsewhere or not refused["cpu"] or refused["cuda"]:
        _check_accepted(refused["cpu"], reason)
        return DeviceChoice(device="cpu", is_certain=not may_be_elsewhere, reason=reason)
    return DeviceChoice(device="cuda", is_certain=False, reason=f"{reason}; cpu refuses this job: {refused['cpu']}")


def other_device(choice: DeviceChoice, refused: Mapping[str, str]) -> str:
    """What the ranks would meet on the device that was not chosen; empty where they cannot be there."""
    if choice.is_certain:
        return ""
    other = "cuda" if choice.device == "cpu" else "cpu"
    if refused[other]:
        return f"on {other} this job is refused before it starts: {refused[other]}"
    return f"on {other} this job is accepted, too, and losses cost the same; memory is shown for {choice.device} only"


def _check_accepted(refusal: str, reason: str = "") -> None:
    if refusal:
        raise ConfigError(f"{refusal} ({reason})" if reason else refusal)


def _why_no_gpu(facts: DeviceFacts) -> str:
    if not facts.has_driver or not facts.num_gpus:
        return "the driver shows none"
    if not facts.torch_has_cuda:
        return "the installed PyTorch is built without CUDA"
    return f"CUDA_VISIBLE_DEVICES={facts.visible} hides them"
