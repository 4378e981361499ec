"""Compilers for kernels: the choice, and the message if there is none."""

import pytest

from megatron_ft.planning.compilers import find_compiler, no_compiler, or_without


@pytest.mark.parametrize(
    ("kernels", "variables", "installed", "expected"),
    [
        ("cpp", {}, {"g++", "clang++"}, ["g++"]),
        ("cpp", {"CXX": "icpx"}, {"g++"}, None),
        ("cpp", {"CXX": "icpx"}, {"g++", "icpx"}, ["icpx"]),
        ("cpp", {"CXX": ""}, {"g++"}, ["g++"]),
        ("cpp", {"CXX": "ccache g++"}, {"ccache", "g++"}, ["ccache", "g++"]),
        ("cpp", {"CXX": "ccache g++"}, {"ccache"}, None),
        ("cpp", {"CXX": "g++ -isystem /opt/include"}, {"g++"}, ["g++", "-isystem", "/opt/include"]),
        ("cpp", {"CXX": "'my tools/g++' -m64"}, {"my tools/g++"}, ["my tools/g++", "-m64"]),
        ("cpp", {"CXX": "env LANG=C g++"}, {"env", "g++"}, ["env", "LANG=C", "g++"]),
        ("cpp", {"CXX": "'g++"}, {"g++"}, None),
        ("cuda", {}, {"/usr/local/cuda/bin/nvcc"}, ["/usr/local/cuda/bin/nvcc"]),
        ("cuda", {"CUDA_HOME": "/opt/cuda"}, {"nvcc", "/opt/cuda/bin/nvcc"}, ["/opt/cuda/bin/nvcc"]),
        ("cuda", {"CUDA_PATH": "/opt/cuda"}, {"nvcc"}, ["nvcc"]),
        ("cuda", {}, {"g++"}, None),
    ],
)
def test_the_first_installed_compiler_is_taken(
    kernels: str, variables: dict[str, str], installed: set[str], expected: list[str] | None
) -> None:
    assert find_compiler(kernels, variables, lambda name: name if name in installed else None) == expected


def test_the_message_names_the_commands_and_what_to_change() -> None:
    assert "tried c++, g++, clang++); install a C++17 compiler or name it in CXX" in no_compiler("cpp", {})
    assert "tried icpx)" in no_compiler("cpp", {"CXX": "icpx"})
    assert "tried ccache g++)" in no_compiler("cpp", {"CXX": "ccache g++"})
    assert no_compiler("cuda", {}).endswith("; install CUDA or name it in CUDA_HOME")
    assert or_without("placement.dispatch_backend") == ", or set placement.dispatch_backend=reference"
    assert or_without("optimizer.update_backend") == ", or set optimizer.update_backend=torch"
