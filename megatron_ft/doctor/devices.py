"""Checks of CUDA devices. They read the driver's files and do not import torch."""

import importlib.util
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ft.doctor.findings import Finding
from megatron_ft.formatting import counted, memory_size
from megatron_ft.planning.devices import DeviceFacts, gpus_needed
from megatron_ft.planning.rank_environment import set_otherwise

if TYPE_CHECKING:  # every start imports this file, and the import of ``needs`` would double its time
    from megatron_ft.doctor.needs import JobNeeds

_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_QUERY_SECONDS = 30.0
"""Time limit for an answer of the NVIDIA driver. Without persistence mode, its first answer takes seconds."""


def observe_devices(visible: str | None, root: Path = Path("/"), *, asks_memory: bool = False) -> DeviceFacts:
    """Observe the CUDA devices of this machine.

    Args:
        visible: value of ``CUDA_VISIBLE_DEVICES``; None if it is not set.
        root: parent of ``proc`` and ``dev``.
        asks_memory: whether to run ``nvidia-smi``, which reports the memory of each GPU, if a driver is installed.
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
    return _built_with_cuda(path.read_text(encoding="utf-8"))


def _built_with_cuda(version_file: str) -> bool:
    """Return whether PyTorch's ``version.py`` names a CUDA version. True if the file has no line ``cuda = ...``."""
    found = re.search(r"^cuda(?:\s*:[^=]*)?\s*=\s*(\S+)", version_file, re.MULTILINE)
    return found is None or found.group(1) != "None"


def _ask_memory() -> int | None:
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _smallest_memory(done.stdout) if done.returncode == 0 else None


def _smallest_memory(answer: str) -> int | None:
    """Return the memory in bytes of the GPU with the least memory. ``answer`` is output of ``nvidia-smi`` with the
    memory of each GPU in MiB, one per line. Return None if no line is a number."""
    # For a GPU whose memory is unknown, the line is ``[N/A]``.
    sizes = [int(line) << 20 for line in answer.split() if line.isdigit()]
    return min(sizes, default=None)


def check_devices(facts: DeviceFacts, needs: "JobNeeds") -> list[Finding]:
    """Report missing GPUs and too little GPU memory for a job on CUDA. For a job on CPU, only list the GPUs."""
    seen = (
        f"{counted(facts.num_gpus, 'GPU')}, driver {facts.driver or 'unknown'}"
        if facts.has_driver
        else "no CUDA device"
    )
    if needs.device == "cpu":
        return [Finding.info("devices", f"{seen}; the job runs on CPU"), *_check_other(needs)]
    if not facts.has_driver or not facts.num_gpus:
        fix = "run this on a node with GPUs (srun), start the container with --gpus all, or set training.device=cpu"
        return [Finding.error("devices", f"{seen}, but the job needs GPUs: {needs.device_reason}", fix)]
    if not facts.torch_has_cuda:
        fix = "install a CUDA build of PyTorch and run make train TORCH=skip, or set training.device=cpu"
        return [Finding.error("devices", f"{seen}, but the installed PyTorch is built without CUDA", fix)]
    usable = facts.usable_gpus()
    if facts.visible is not None:
        seen += f", {usable} of the GPUs visible by CUDA_VISIBLE_DEVICES={facts.visible}"
    needed = gpus_needed(needs.ranks_here, needs.ranks_per_gpu)
    if usable < needed:
        each = "a GPU each" if needs.ranks_per_gpu == 1 else f"{needed} GPUs, with {needs.ranks_per_gpu} ranks on each"
        what = f"{seen}; {counted(needs.ranks_here, 'rank')} on this machine must have {each}"
        fix = f"set launch.ranks_per_node={usable // needs.nodes_here or 1}, or use another machine"
        return [Finding.error("devices", what, fix)]
    return [
        Finding.info("devices", f"{seen}; {counted(needs.ranks_here, 'rank')} of the job run on this machine"),
        *_check_gpu_memory(facts, needs),
    ]


def check_environment(variables: Mapping[str, str], needs: "JobNeeds") -> list[Finding]:
    """List the environment variables that the job sets for ranks on CUDA. Warn about each of these variables that
    already has another value.

    Args:
        variables: environment in which the job is started.
    """
    found = []
    for name, value in set_otherwise(needs.environment, variables).items():
        what = f"{name}={value} is set; this job would set {name}={needs.environment[name]}"
        found.append(Finding.warning("environment", what, f"unset {name}, unless this value is intended"))
    if needs.environment:
        names = " ".join(f"{name}={value}" for name, value in needs.environment.items())
        found.append(
            Finding.info("environment", f"the job sets these variables for its ranks, if they are not set: {names}")
        )
    return found


def _check_other(needs: "JobNeeds") -> list[Finding]:
    if not needs.other_device:
        return []
    if needs.starts_elsewhere and needs.is_refused_there:
        return [Finding.warning("devices", needs.other_device, "set training.device to the device of the job's nodes")]
    return [Finding.info("devices", needs.other_device)]


def _check_gpu_memory(facts: DeviceFacts, needs: "JobNeeds") -> list[Finding]:
    needed = f"a rank needs up to {memory_size(needs.device_bytes)} of GPU memory (activations estimated)"
    if facts.gpu_memory_bytes is None:
        if needs.gpu_memory_bytes is not None:
            return []  # the plan was already compared with this limit
        what = f"{needed}, but the memory of the GPUs is unknown: nvidia-smi does not answer"
        return [Finding.warning("devices", what, "set limits.gpu_memory_bytes to the memory of one GPU")]
    if needs.device_bytes > facts.gpu_memory_bytes:
        fix = "use more ranks, larger parallel sizes, training.recompute_granularity=full or a smaller micro_batch_size"
        return [
            Finding.error(
                "devices", f"{needed}; the smallest GPU on this machine has {memory_size(facts.gpu_memory_bytes)}", fix
            )
        ]
    return [
        Finding.info("devices", f"{needed}; the smallest GPU on this machine has {memory_size(facts.gpu_memory_bytes)}")
    ]
