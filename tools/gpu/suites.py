"""Stages ``dispatch``, ``fp8``, ``snapshots`` and ``engine`` of ``tools/gpu_day.py``: run the pytest tests that need a
GPU, in the stage's process.

Without a GPU, each stage runs a few tests that need no GPU instead.
"""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tools.gpu.day import Day
from tools.gpu.runner import ROOT

DISPATCH = ("tests/contract/test_dispatch.py", "tests/gpu/test_dispatch_cuda.py")
SNAPSHOTS = tuple(f"tests/gpu/test_{name}.py" for name in ("copier", "window", "upstream_log", "pace"))
FP8 = "tests/gpu/test_fp8.py"
ENGINE = "tests/gpu/test_transformer_engine.py"


def run_dispatch(day: Day) -> None:
    """Run the tests of the dispatch kernels."""
    run_tests(day, DISPATCH if day.has_gpu else (DISPATCH[0], "-k", "reference and one-rank"))


def run_fp8(day: Day) -> None:
    """Run the GPU tests of FP8 products and of scaled AdamW. The comparison with FusedAdam is part of stage ``engine``.
    Without a GPU, run tests of ``transformer_engine_ext`` that need no GPU."""
    run_tests(
        day, (FP8, "-k", "not fused_adam") if day.has_gpu else ("tests/unit/transformer_engine_ext/test_providers.py",)
    )


def run_snapshots(day: Day) -> None:
    """Run the tests of copying state from the GPU to the host."""
    run_tests(day, SNAPSHOTS if day.has_gpu else ("tests/unit/snapshot/capture/test_window_memory.py",))


def run_engine(day: Day) -> None:
    """Run the tests of Transformer Engine. Without a GPU, run the tests of the function that checks whether Transformer
    Engine is installed."""
    run_tests(
        day,
        (ENGINE, f"{FP8}::test_masters_move_as_those_of_fused_adam")
        if day.has_gpu
        else ("tests/unit/mcore/device/test_software.py",),
    )


def run_tests(day: Day, arguments: tuple[str, ...]) -> None:
    """Run pytest, and report counts and failures. Without a GPU, also report which tests replaced the GPU tests."""
    import pytest

    junit = day.folder / "junit.xml"
    code = pytest.main([*arguments, "-p", "no:cacheprovider", f"--junitxml={junit}", f"--rootdir={ROOT}"])
    counts, failures = read_junit(junit)
    day.record(counts=counts)
    for failure in failures:
        day.check(False, failure)
    day.check(code == 0 or bool(failures), f"pytest ended with exit code {code}")
    day.check(counts["passed"] > 0, "no test passed")
    if not day.has_gpu:
        day.lacks("the tests on a GPU", "torch sees no GPU")


def read_junit(path: Path) -> tuple[dict[str, int], list[str]]:
    """Return the numbers of passed, failed and skipped tests, and each failed test's name and first error line."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        broken = next((found for found in case if found.tag in ("failure", "error")), None)
        if broken is not None:
            counts["failed"] += 1
            failures.append(f"{case.get('name')}: {str(broken.get('message')).splitlines()[0][:300]}")
        else:
            counts["skipped" if case.find("skipped") is not None else "passed"] += 1
    return counts, failures
