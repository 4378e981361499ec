"""Imports once, in the fork server, all packages that stages need.

The import of this module does the work, because ``multiprocessing`` can only preload modules in a fork server.
``problem`` names the package that could not be imported; a stage that needs it fails by itself. ``device_type`` is
decided before the CPU layer is installed, because that layer reports a device of its own.
"""

import signal
import time
import traceback
import warnings
from importlib import import_module

MAX_SECONDS = 240
"""Limit of all imports. If one hangs, the fork server ends, and stages start without it."""
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
except Exception:  # noqa: BLE001 - the stage "facts" reports it
    problem = traceback.format_exc()
finally:
    signal.alarm(0)
