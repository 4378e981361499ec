"""Imports all packages that stages of ``tools/gpu_day.py`` need. The fork server, which forks all stages, preloads it.

The imports run when this module is imported, because a fork server of ``multiprocessing`` can only preload modules.
If an import fails, ``problem`` contains the traceback, and each stage that needs the package fails. ``device_type`` is
set before Megatron's layer for CPUs is installed, because this layer changes the device that torch reports.
"""

import signal
import time
import traceback
import warnings
from importlib import import_module

MAX_SECONDS = 240
"""Time limit of all imports in seconds. If an import hangs, the fork server ends, and stages start without it."""
problem = ""
device_type = "cpu"
seconds: dict[str, float] = {}


def _import_all() -> None:
    global device_type
    began = time.perf_counter()
    import_module("torch")
    seconds["torch"] = round(time.perf_counter() - began, 2)
    from tools.gpu.day import find_device_type

    device_type = find_device_type()
    began = time.perf_counter()
    main = import_module("megatron_ft.mcore.rank_main")
    (main.warm_cuda if device_type == "cuda" else main.warm)()
    seconds["what ranks need"] = round(time.perf_counter() - began, 2)


signal.alarm(MAX_SECONDS)
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _import_all()
except Exception:  # noqa: BLE001 - the stage "facts" reports ``problem``
    problem = traceback.format_exc()
finally:
    signal.alarm(0)
