"""The source that is also compiled for CUDA gives the reference's shares if threads visit items at the same time."""

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from megatron_ft.planning.dispatch import quotas
from megatron_ft.runtime.dispatch import extension

SOURCE = extension.ROOT / "tests" / "helpers" / "threaded_shares.cpp"
CASES = ((1, 1), (8, 3), (32, 16), (64, 40), (5, 12))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    command = [*extension._find_compiler("cpp"), "-std=c++20", "-O2", "-fPIC", "-pthread", "-shared"]
    command += [f"-I{extension.SOURCES}"]
    folder: Path = tmp_path_factory.mktemp("threaded")
    return ctypes.CDLL(str(extension._build("cpp", command, [SOURCE], folder)))


def threaded(
    library: ctypes.CDLL, tokens: npt.NDArray[np.int64], replicas: npt.NDArray[np.int64], members: int
) -> npt.NDArray[np.int64]:
    found = np.full_like(tokens, -1)
    sizes = (ctypes.c_int64(size) for size in (*tokens.shape, members))
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in (tokens, replicas, found)]
    library.threaded_quotas(*pointers[:2], *sizes, pointers[2])
    return found


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_compute_the_references_shares(library: ctypes.CDLL, case: tuple[int, int], members: int) -> None:
    num_experts, num_ranks = case
    generator = np.random.default_rng(num_experts)
    for num_neighbours in (2, num_ranks):
        replicas = np.zeros(case, dtype=np.int64)
        for expert in range(num_experts):
            first = expert * num_ranks // num_experts
            near = first + generator.integers(0, num_neighbours, 2)
            replicas[expert, np.append(near, first) % num_ranks] += 1
        tokens = generator.multinomial(3000, generator.dirichlet(np.full(num_experts, 0.7)), num_ranks).T.copy()
        assert (threaded(library, tokens, replicas, members) == quotas(tokens, replicas)).all()
