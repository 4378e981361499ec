"""Reads recorded expert loads for claims. The recordings are stored beside the repository and are not part of it."""

from benchmarks.source import ROOT
from megatron_ft.errors import DataError
from megatron_ft.expert_loads import ExpertLoads

FOLDER = ROOT.parent / "shared" / "data" / "expert_load"
SMARTMOE = "smartmoe_gate_counts.npz"
DEEPSEEK = (
    "deepseek_v3_decode_in1000out1000.json",
    "deepseek_v3_prefill_in1024.json",
    "deepseek_v3_prefill_in512.json",
)


def read(name: str) -> ExpertLoads:
    """Read a recording by its file name.

    Raises:
        DataError: the file does not exist.
    """
    if not (FOLDER / name).exists():
        raise DataError(f"{name}: is not among the recorded loads, shared/data/expert_load beside the repository")
    return ExpertLoads.read(FOLDER / name)
