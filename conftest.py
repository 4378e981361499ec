"""Fixtures for all tests, how several workers share them, and the rule that a test session leaves no process behind."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_ft.testing import leftovers
from tests.helpers import sharing

pytest_plugins = ["megatron_ft.testing.fixtures"]

MARK, MARKED = leftovers.mark()
GRACE_SECONDS = 10.0
LEFT = pytest.StashKey[list[str]]()

os.environ.update(MARKED)
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # its threads are those of tests before, and what forks, execs
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("WANDB_SILENT", "true")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests in a folder of processes, of GPUs or of Slurm carry its marker; GPU tests skip themselves without one."""
    for item in items:
        folders = item.path.parts
        for folder in ("distributed", "gpu", "slurm"):
            if folder in folders:
                item.add_marker(folder)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False"))
    items.sort(key=lambda item: sharing.place(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Make a skipped test of GPUs a failed one under ``MEGATRON_FT_GPU_DAY=1``: a day is not passed by skipping."""
    report: Any = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("MEGATRON_FT_GPU_DAY") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped on a GPU day: {report.longrepr[-1]}"
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole groups of tests, the longest first."""
    return sharing.make_scheduler(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker says it has left behind; one that crashed says nothing, and its mark is ours as well."""
    node.config.stash.setdefault(LEFT, []).extend(getattr(node, "workeroutput", {}).get("left", []))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _end_own_services() -> None:
    """End what this very process started for itself and would end at its exit: wandb's service."""
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session that leaves processes behind, and end them."""
    _end_own_services()
    left = session.config.stash.setdefault(LEFT, [])
    left += leftovers.outlive(MARK, grace_seconds=GRACE_SECONDS)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left"] = left
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Name what was left behind."""
    left = config.stash.get(LEFT, [])
    if left:
        terminalreporter.section("processes left behind by tests (ended now)", red=True)
        for line in left:
            terminalreporter.line(line)
