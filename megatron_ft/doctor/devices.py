"""CUDA devices, by the driver's files: torch is not asked."""

from dataclasses import dataclass
from pathlib import Path

from megatron_ft.doctor.findings import Finding, error, told
from megatron_ft.doctor.needs import JobNeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What NVIDIA's driver shows."""

    has_driver: bool
    """Whether ``/dev/nvidiactl`` exists."""
    driver: str
    """Its version, empty where it does not say."""
    num_gpus: int
    """Device files that this process could open: a container may have some of them only."""
    visible: str | None = None
    """``CUDA_VISIBLE_DEVICES``; None where it is not set."""


def observe_devices(visible: str | None, root: Path = Path("/")) -> DeviceFacts:
    """Look. ``root`` is where ``proc`` and ``dev`` lie."""
    version = root / "proc/driver/nvidia/version"
    words = version.read_text(encoding="utf-8").splitlines()[0].split() if version.exists() else []
    return DeviceFacts(
        has_driver=(root / "dev/nvidiactl").exists(),
        driver=next((word for word in words if word[0].isdigit() and "." in word), ""),
        num_gpus=sum(path.name.removeprefix("nvidia").isdigit() for path in (root / "dev").glob("nvidia*")),
        visible=visible,
    )


def check_devices(facts: DeviceFacts, needs: JobNeeds) -> list[Finding]:
    """Enough GPUs for a job on CUDA; on CPU they are told."""
    seen = f"{facts.num_gpus} GPUs, driver {facts.driver or 'unknown'}" if facts.has_driver else "no CUDA device"
    if needs.device == "cpu":
        return [told("devices", f"{seen}; the job runs on CPU")]
    if not facts.has_driver or not facts.num_gpus:
        asked = "training.device=cuda" if needs.device_is_asked_for else "launch.gpu_memory_bytes is given"
        mend = "run this on a node with GPUs (srun), give the container --gpus all, or training.device=cpu"
        return [error("devices", f"{seen}, and {asked}", mend)]
    usable = facts.num_gpus
    if facts.visible is not None:
        usable = min(usable, len([name for name in facts.visible.split(",") if name.strip()]))
        seen += f", {usable} of them by CUDA_VISIBLE_DEVICES={facts.visible}"
    if usable < needs.ranks_here:
        what = f"{seen}; {needs.ranks_here} ranks here need one each"
        return [error("devices", what, f"launch.ranks_per_node={usable // needs.nodes_here or 1}, or another machine")]
    return [told("devices", f"{seen}; {needs.ranks_here} ranks here")]
