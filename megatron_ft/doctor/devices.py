"""CUDA device checks from the driver's files, without torch."""

import importlib.util
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from megatron_ft.doctor.findings import Finding, amount, error, info, warning
from megatron_ft.doctor.needs import JobNeeds
from megatron_ft.planning.devices import DeviceFacts, gpus_needed, usable_gpus
from megatron_ft.planning.rank_environment import set_otherwise

_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_QUERY_SECONDS = 30.0
"""Longest wait for the driver; without persistence mode its first answer takes seconds."""


def observe_devices(visible: str | None, root: Path = Path("/"), *, asks_memory: bool = False) -> DeviceFacts:
    """Observe the CUDA devices of this machine.

    Args:
        visible: ``CUDA_VISIBLE_DEVICES``; None where it is not set.
        root: parent of ``proc`` and ``dev``.
        asks_memory: run ``nvidia-smi`` for the memory of GPUs where a driver is present.
    """
    version = root / "proc/driver/nvidia/version"
    words = version.read_text(encoding="utf-8").splitlines()[0].split() if version.exists() else []
    has_driver = (root / "dev/nvidiactl").exists()
    return DeviceFacts(
        has_driver=has_driver,
        driver=next((word for word in words if word[0].isdigit() and "." in word), ""),
        num_gpus=sum(path.name.removeprefix("nvidia").isdigit() for path in (root / "dev").glob("nvidia*")),
        visible=visible,
        torch_has_cuda=_torch_has_cuda(),
        gpu_memory_bytes=_ask_memory() if asks_memory and has_driver else None,
    )


def _torch_has_cuda() -> bool:
    spec = importlib.util.find_spec("torch")
    # Read as text: importing torch takes seconds and may fail on the machine that is checked.
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / "version.py"
    if path is None or not path.exists():
        return True
    return built_with_cuda(path.read_text(encoding="utf-8"))


def built_with_cuda(version_file: str) -> bool:
    """Whether the text of PyTorch's ``version.py`` names a version of CUDA; True where it has no such line."""
    found = re.search(r"^cuda(?:\s*:[^=]*)?\s*=\s*(\S+)", version_file, re.MULTILINE)
    return found is None or found.group(1) != "None"


def _ask_memory() -> int | None:
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return smallest_memory(done.stdout) if done.returncode == 0 else None


def smallest_memory(answer: str) -> int | None:
    """Parse the bytes of the smallest GPU from ``nvidia-smi``'s answer, a line of MiB for each; None
    without a figure."""
    # A GPU without a figure answers ``[N/A]``.
    sizes = [int(line) << 20 for line in answer.split() if line.isdigit()]
    return min(sizes, default=None)


def check_devices(facts: DeviceFacts, needs: JobNeeds) -> list[Finding]:
    """Report missing GPUs and too little GPU memory for a job on CUDA; list the GPUs for a job on CPU."""
    seen = f"{facts.num_gpus} GPUs, driver {facts.driver or 'unknown'}" if facts.has_driver else "no CUDA device"
    if needs.device == "cpu":
        return [info("devices", f"{seen}; the job runs on CPU"), *_check_other(needs)]
    if not facts.has_driver or not facts.num_gpus:
        fix = "run this on a node with GPUs (srun), give the container --gpus all, or training.device=cpu"
        return [error("devices", f"{seen}, and the job needs GPUs: {needs.device_reason}", fix)]
    if not facts.torch_has_cuda:
        fix = "install a CUDA build of PyTorch, then make train TORCH=skip; or training.device=cpu"
        return [error("devices", f"{seen}, and the installed PyTorch is built without CUDA", fix)]
    usable = usable_gpus(facts)
    if facts.visible is not None:
        seen += f", {usable} of them by CUDA_VISIBLE_DEVICES={facts.visible}"
    needed = gpus_needed(needs.ranks_here, needs.ranks_per_gpu)
    if usable < needed:
        each = "one each" if needs.ranks_per_gpu == 1 else f"{needed}, {needs.ranks_per_gpu} ranks on one"
        what = f"{seen}; {needs.ranks_here} ranks here need {each}"
        return [error("devices", what, f"launch.ranks_per_node={usable // needs.nodes_here or 1}, or another machine")]
    return [info("devices", f"{seen}; {needs.ranks_here} ranks here"), *_check_gpu_memory(facts, needs)]


def check_environment(variables: Mapping[str, str], needs: JobNeeds) -> list[Finding]:
    """Report the variables that ranks get on CUDA, and those set to another value here.

    Args:
        variables: the environment that the job is started in.
    """
    found = []
    for name, value in set_otherwise(needs.environment, variables).items():
        what = f"{name}={value} is set; this job would set {name}={needs.environment[name]}"
        found.append(warning("environment", what, f"unset {name}, unless it is intended"))
    if needs.environment:
        names = " ".join(f"{name}={value}" for name, value in needs.environment.items())
        found.append(info("environment", f"ranks get, unless it is set: {names}"))
    return found


def _check_other(needs: JobNeeds) -> list[Finding]:
    if not needs.other_device:
        return []
    if needs.starts_elsewhere and needs.is_refused_there:
        return [warning("devices", needs.other_device, "set training.device to what the job's nodes have")]
    return [info("devices", needs.other_device)]


def _check_gpu_memory(facts: DeviceFacts, needs: JobNeeds) -> list[Finding]:
    needed = f"the largest rank needs {amount(needs.device_bytes)} of GPU memory (activations estimated)"
    if facts.gpu_memory_bytes is None:
        if needs.gpu_memory_bytes is not None:
            return []  # the plan has been compared with it
        what = f"{needed}, which is compared with nothing: nvidia-smi does not answer"
        return [warning("devices", what, "set limits.gpu_memory_bytes to the memory of one GPU")]
    if needs.device_bytes > facts.gpu_memory_bytes:
        fix = "more ranks, larger parallel sizes, training.recompute_granularity=full or a smaller micro_batch_size"
        return [error("devices", f"{needed}; the smallest GPU here has {amount(facts.gpu_memory_bytes)}", fix)]
    return [info("devices", f"{needed}, of {amount(facts.gpu_memory_bytes)}")]
