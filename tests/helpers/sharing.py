"""Distributes the tests of a run over several workers of ``pytest -n``, in whole groups, the longest first.

A group is a module, so that its fixtures are made once. A claim is also a group, unless it is counted in the jobs of
another claim. A test on a Slurm cluster is a group, because it has its own cluster.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

LONGEST = (
    "tests/slurm/",
    "tests/distributed/test_in_place.py",
    "tests/distributed/test_elastic",
    "benchmarks/tests/test_elastic_jobs.py",
    "tests/distributed/test_engine.py",
    "tests/distributed/test_replicas.py",
    "tests/functional/",
    "benchmarks/tests/test_claims_quick.py",
    "tests/distributed/",
    "tests/contract/",
)
"""Beginnings of test ids in the order in which their tests run. All other tests are short and run last."""
_CLAIMS = "benchmarks/tests/test_claims_quick.py::"
_ONE_JOURNAL = {"recomputed-iterations": "localized-bitwise"}
"""Claims that are counted in the jobs of another claim, by id."""


def place(test: str) -> tuple[int, str]:
    """Return the position of a test in the order of the run, by its group; groups of ``LONGEST`` come first."""
    mine = group(test)
    return next((number for number, start in enumerate(LONGEST) if mine.startswith(start)), len(LONGEST)), mine


def group(test: str) -> str:
    """Return the group of a test. One worker runs all tests of a group, one after the other."""
    if test.startswith(_CLAIMS):
        claim = test.partition("[")[2].rstrip("]")
        return f"{_CLAIMS}{_ONE_JOURNAL.get(claim, claim)}"
    return test if test.startswith("tests/slurm/") else test.partition("::")[0]


def runs_extended(request: pytest.FixtureRequest) -> bool:
    """Return whether tests marked ``extended`` of the fixture's module run, so that the fixture must prepare them
    too."""
    mine = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker("extended") for item in mine)


def chosen(names: Iterable[Any], extended: Collection[Any]) -> list[Any]:
    """Return parameters for ``pytest.mark.parametrize``: all of ``names``, with the mark ``extended`` on those in
    ``extended``."""
    return [pytest.param(name, marks=pytest.mark.extended) if name in extended else name for name in names]


def make_scheduler(config: Any, log: Any) -> Any:
    """Return a scheduler of pytest-xdist that gives a worker one group after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    config.option.loadscopereorder = False
    return ByGroup(config, log)
