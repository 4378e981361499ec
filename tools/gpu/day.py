"""Gives each stage of ``tools/gpu_day.py`` its context, and stores its reports: figures, problems, parts not run.

Each report is appended to a file immediately, so that the reports of a stage that is killed are not lost.
"""

import contextlib
import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GPU_DAY = "MEGATRON_FT_GPU_DAY"
"""Environment variable that is 1 in every stage that sees a GPU. Such a stage fails if one of its parts cannot
run."""
REPORT = "report.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """Context of one stage of ``tools/gpu_day.py``: device, folders, deadline, and methods that report results."""

    device_type: str
    """Device of the stage: ``cuda`` or ``cpu``. On a CPU, stages run the same code as on a GPU, with small sizes."""
    folder: Path
    """Folder of this stage: its log, its report and its files."""
    shared: Path
    """Folder that all stages of one call of ``tools/gpu_day.py`` share. Later stages can read its files."""
    deadline: float
    """Time at which the stage is killed, by ``time.monotonic()``."""

    @property
    def has_gpu(self) -> bool:
        """Return whether the stage runs on a GPU."""
        return self.device_type == "cuda"

    @property
    def remaining_seconds(self) -> float:
        """Return the time until the stage is killed."""
        return self.deadline - time.monotonic()

    def record(self, **figures: Any) -> None:
        """Report figures by name. The values must be JSON values."""
        self._append({"figures": figures})
        print(json.dumps(figures, default=str), flush=True)

    def check(self, holds: bool, problem: str) -> None:
        """Report ``problem`` unless ``holds`` is true. The stage then continues, but counts as failed."""
        if not holds:
            self._append({"problem": problem})
            print(f"PROBLEM {problem}", flush=True)

    def lacks(self, part: str, reason: str) -> None:
        """Report that part of the stage cannot run on this machine. With ``MEGATRON_FT_GPU_DAY=1`` the stage fails."""
        if os.environ.get(GPU_DAY) == "1":
            self.check(False, f"{part} was not run: {reason}")
        else:
            self._append({"not_run": f"{part}: {reason}"})

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Report an exception in the ``with`` block as a problem. Then the next parts of the stage still run."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - after any exception, the next parts still run
            traceback.print_exc()
            self.check(False, f"{name}: {describe(error)}")

    def _append(self, entry: Mapping[str, Any]) -> None:
        with (self.folder / REPORT).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, default=str) + "\n")


def describe(error: BaseException) -> str:
    """Describe an error by its type and message. The middle of a text longer than 1000 characters is left out, because
    the end usually contains the cause."""
    text = f"{type(error).__name__}: {error}".strip()
    return text if len(text) <= 1000 else f"{text[:200]} ... {text[-800:]}"


def read_report(folder: Path) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the figures, problems and skipped parts that a stage has reported so far."""
    figures: dict[str, Any] = {}
    problems, not_run = [], []
    path = folder / REPORT
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        entry = json.loads(line)
        figures |= entry.get("figures", {})
        problems += [entry["problem"]] if "problem" in entry else []
        not_run += [entry["not_run"]] if "not_run" in entry else []
    return figures, problems, not_run


def find_device_type() -> str:
    """Return ``cuda`` if torch reports a GPU, otherwise ``cpu``. The check does not initialise CUDA, so that this
    process can still be forked."""
    import torch

    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return "cuda" if torch.version.cuda is not None and torch.cuda.is_available() else "cpu"
    finally:
        # If the variable remained set, torch would mistake the device count of Megatron's layer for CPUs for a GPU.
        os.environ.pop(name) if before is None else os.environ.update({name: before})
