"""Chooses the device on which a job trains, from the facts that ``doctor/devices.py`` collects about a machine."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ft.config.job import LaunchConfig, RecoveryConfig
from megatron_ft.errors import ConfigError, SeveralErrors


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Facts about NVIDIA's driver and the installed PyTorch, found without importing PyTorch."""

    has_driver: bool
    """Whether ``/dev/nvidiactl`` exists."""
    driver: str
    """Version of the driver; empty if unknown."""
    num_gpus: int
    """Number of GPU device files that this process can open; a container may have only some of them."""
    visible: str | None = None
    """``CUDA_VISIBLE_DEVICES``; None if it is not set."""
    torch_has_cuda: bool = True
    """Whether the installed PyTorch is built for CUDA; True if unknown."""
    gpu_memory_bytes: int | None = None
    """Memory of the smallest GPU; None if it was not queried or the driver did not answer."""

    def usable_gpus(self) -> int:
        """Return the number of GPUs that PyTorch can use. An invalid entry of ``CUDA_VISIBLE_DEVICES`` hides all GPUs
        that are listed after the entry."""
        if not self.has_driver or not self.torch_has_cuda:
            return 0
        if self.visible is None:
            return self.num_gpus
        num_named = 0
        for name in self.visible.split(","):
            # CUDA ignores all entries after an invalid one (CUDA C++ Programming Guide, environment variables).
            if not name.strip() or name.strip().startswith("-"):
                break
            num_named += 1
        # A container may have fewer device files than the variable names.
        return min(self.num_gpus, num_named)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """Device for which a job is planned, and the reason for the choice of this device."""

    device: str
    """``cpu`` or ``cuda``."""
    is_certain: bool
    """Whether ranks are certain to use this device. False if ``training.device=auto`` and the devices of the machines
    on which ranks will run are not known."""
    reason: str

    @classmethod
    def of(
        cls,
        requested: str,
        facts: DeviceFacts,
        *,
        gpu_memory_bytes: int | None,
        refused: Mapping[str, str],
        may_be_elsewhere: bool,
    ) -> "DeviceChoice":
        """Resolve ``training.device``.

        Args:
            requested: value of the key.
            facts: facts about this machine.
            gpu_memory_bytes: ``limits.gpu_memory_bytes``; if it is set, the job is meant for GPUs.
            refused: for each possible device, the reason why it cannot run the configuration; empty if it can.
            may_be_elsewhere: whether ranks may run on other machines with unknown devices, as in a dry run.

        Raises:
            ConfigError: the device cannot run the configuration, or the job is meant for GPUs and this machine has
                none.
        """
        if requested != "auto":
            _check_accepted(refused[requested])
            return cls(device=requested, is_certain=True, reason=f"training.device={requested}")
        num_gpus = facts.usable_gpus()
        if num_gpus:
            reason = f"training.device=auto found {num_gpus} GPU{'' if num_gpus == 1 else 's'} on this machine"
            _check_accepted(refused["cuda"], reason)
            return cls(device="cuda", is_certain=True, reason=reason)
        # The job is meant for GPUs, so it trains on CPU only if the user asks for that.
        if gpu_memory_bytes is not None:
            if not may_be_elsewhere:
                constraint = "finds no GPU; for CPU, set training.device=cpu and limits.gpu_memory_bytes=null: "
                raise ConfigError.of("training.device", "auto", constraint + _why_no_gpu(facts))
            reason = "training.device=auto, and limits.gpu_memory_bytes is set"
            _check_accepted(refused["cuda"], reason)
            return cls(device="cuda", is_certain=True, reason=reason)
        reason = f"training.device=auto found no GPU on this machine: {_why_no_gpu(facts)}"
        # A starting job must use this machine. A plan for unknown machines chooses cuda if only cuda can run the job.
        if not may_be_elsewhere or not refused["cpu"] or refused["cuda"]:
            _check_accepted(refused["cpu"], reason)
            return cls(device="cpu", is_certain=not may_be_elsewhere, reason=reason)
        return cls(
            device="cuda",
            is_certain=False,
            reason=f"{reason}; on cpu this job would be refused: " + "; ".join(refused["cpu"].splitlines()),
        )


def node_on_host(launch: LaunchConfig, node: int) -> int:
    """Return the index, from 0, of ``node`` among the nodes of its machine.

    With ``launch.node_launcher=local``, all nodes run on the machine of the command; other launchers start one node on
    each machine.
    """
    return node if launch.mode == "local" and launch.node_launcher == "local" else 0


def device_index(
    *, node_on_host: int, local_rank: int, ranks_per_node: int, num_visible: int, ranks_per_gpu: int = 1
) -> int:
    """Return the index of a rank's GPU among the GPUs that are visible to its process.

    A machine may host several nodes: its first GPUs belong to the ranks of its first node, the next GPUs to the ranks
    of its second node, and so on. A process with only one visible GPU uses this GPU, because the launcher has bound the
    process to it (``srun --gpus-per-task=1``).

    Args:
        node_on_host: index of the rank's node among the nodes of its machine.
        local_rank: index of the rank on its node.
        num_visible: number of GPUs that are visible to the process.
        ranks_per_gpu: number of ranks that share one GPU.

    Raises:
        ConfigError: the process has too few visible GPUs for this rank.
    """
    if num_visible == 1:
        return 0
    place = node_on_host * ranks_per_node + local_rank
    index = place // ranks_per_gpu
    if index >= num_visible:
        constraint = (
            f"must be larger, or the machine must have more GPUs: process {place} of this machine needs GPU {index} "
            f"(both counted from 0), but the number of visible GPUs is {num_visible}"
        )
        raise ConfigError.of("launch.ranks_per_gpu", ranks_per_gpu, constraint)
    return index


def gpus_needed(num_ranks: int, ranks_per_gpu: int) -> int:
    """Return the number of GPUs that are necessary for ``num_ranks`` ranks on one machine."""
    return -(-num_ranks // ranks_per_gpu)


def other_device(choice: DeviceChoice, refused: Mapping[str, str], recovery: RecoveryConfig) -> str:
    """Return a sentence that states whether the job could run on the device that was not chosen. The sentence is empty
    if the choice is certain.

    Args:
        refused: for each possible device, the reason why it cannot run the configuration; empty if it can.
    """
    if choice.is_certain:
        return ""
    other = "cuda" if choice.device == "cpu" else "cpu"
    if refused[other]:
        return f"on {other} this job would be refused before it starts: {'; '.join(refused[other].splitlines())}"
    losses = "with the same cost of losses"
    if recovery.keep_layout and recovery.keep_processes is None:
        does = "all ranks would start again" if other == "cuda" else "living ranks would continue in their processes"
        losses = f"but after a loss {does} (recovery.keep_processes=null)"
    return f"on {other} this job would also be accepted, {losses}; the plan shows memory for {choice.device} only"


def _check_accepted(refusal: str, reason: str = "") -> None:
    errors = [ConfigError(f"{line} ({reason})" if reason else line) for line in refusal.splitlines()]
    if errors:
        raise errors[0] if len(errors) == 1 else SeveralErrors(errors)


def _why_no_gpu(facts: DeviceFacts) -> str:
    if not facts.has_driver or not facts.num_gpus:
        return "no driver or no GPU was found"
    if not facts.torch_has_cuda:
        return "the installed PyTorch is built without CUDA"
    return f"CUDA_VISIBLE_DEVICES={facts.visible} hides all GPUs"
