"""How several workers of ``pytest -n`` share the tests of a run: in whole groups, the longest first.

A group is a module, so that its fixtures are made once. A claim is a group, unless it is counted in the jobs of another
one, and so is a test on a Slurm cluster, which has a cluster of its own.
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
"""Beginnings of test ids in the order in which their tests are run; the others, which are short, come last."""
_CLAIMS = "benchmarks/tests/test_claims_quick.py::"
_ONE_JOURNAL = {"recomputed-iterations": "localized-bitwise"}
"""A claim that is counted in the jobs of another one, by id."""


def place(test: str) -> tuple[int, str]:
    """Where the test with this id comes in the order of a run: by its group, those of ``LONGEST`` first."""
    mine = group(test)
    return next((number for number, start in enumerate(LONGEST) if mine.startswith(start)), len(LONGEST)), mine


def group(test: str) -> str:
    """The group of the test with this id: all its tests are run by one worker, one after the other."""
    if test.startswith(_CLAIMS):
        claim = test.partition("[")[2].rstrip("]")
        return f"{_CLAIMS}{_ONE_JOURNAL.get(claim, claim)}"
    return test if test.startswith("tests/slurm/") else test.partition("::")[0]


def runs_extended(request: pytest.FixtureRequest) -> bool:
    """Whether tests marked ``extended`` of the fixture's module are run, so that it has to train for them as well."""
    mine = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker("extended") for item in mine)


def chosen(names: Iterable[Any], extended: Collection[Any]) -> list[Any]:
    """Parameters for ``pytest.mark.parametrize``: all of ``names``, those in ``extended`` marked so."""
    return [pytest.param(name, marks=pytest.mark.extended) if name in extended else name for name in names]


def make_scheduler(config: Any, log: Any) -> Any:
    """A scheduler of pytest-xdist that gives a worker one group after the other."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    config.option.loadscopereorder = False
    return ByGroup(config, log)
