"""The quick variant of every claim holds."""

import pytest

from benchmarks import hardware
from benchmarks.claims import Claim, load_claims
from benchmarks.prove import prove

QUICK_TIMEOUT_SECONDS = 300


def as_parameter(claim: Claim) -> object:
    """A claim as a test's parameter, marked by how long it takes."""
    marks = [pytest.mark.timeout(QUICK_TIMEOUT_SECONDS * claim.quick_tries)]
    extended = [pytest.mark.slow, pytest.mark.extended]
    kinds = {"fast": [], "slow": [pytest.mark.slow], "extended": extended, "timed": [*extended, pytest.mark.timed]}
    return pytest.param(claim, id=claim.id, marks=marks + kinds[claim.quick_is])


@pytest.mark.parametrize("claim", [as_parameter(claim) for claim in load_claims().values()])
def test_quick_variant_passes(claim: Claim) -> None:
    here = str(hardware.describe()["class"])
    if here not in claim.hardware:
        pytest.skip(f"{claim.id} is measured on {', '.join(claim.hardware)}; this machine is {here}")
    if claim.missing is not None:
        pytest.skip(f"{claim.id}: {claim.missing}")
    lines = []
    for _ in range(claim.quick_tries):
        line, passed = prove(claim, quick=True)
        if passed:
            return
        lines.append(line)
    pytest.fail("\n".join(lines))
