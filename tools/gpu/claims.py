"""Stages of ``tools/gpu_day.py speed``. Each measures a claim of ``benchmarks/claims.yaml`` and checks its threshold.

A stage has the name of its claim. Without a GPU, a stage runs the quick variant on the CPU and checks no threshold.
"""

import importlib
import json
from dataclasses import replace

from benchmarks.claims import RESULTS_DIR, load_claims
from benchmarks.prove import FIELDS, prove
from tools.gpu.day import Day

RESERVE_SECONDS = 15.0
"""Part of the stage's time limit that is reserved for stopping a slow script and for writing the result."""


def run(day: Day) -> None:
    """Measure the claim that has the same name as the stage."""
    claim = load_claims()[day.folder.name]
    if day.has_gpu:
        seconds = min(claim.timeout_seconds, day.remaining_seconds - RESERVE_SECONDS)
        line, passed = prove(replace(claim, timeout_seconds=seconds), quick=False, results_dir=RESULTS_DIR)
        day.record(result=line)
        day.check(passed, line)
        return
    out = day.folder / "result.json"
    importlib.import_module(claim.module).main(["--quick", "--out", str(out)])
    result = json.loads(out.read_text(encoding="utf-8"))
    day.record(quick_figure=result["figure"], counts=result["counts"])
    day.check(
        all(field in result for field in FIELDS),
        f"the result must have the fields {', '.join(FIELDS)}, but has {sorted(result)}",
    )
    day.check(result["id"] == claim.id, f"the result is that of another claim, {result['id']}")
    day.check(
        result["threshold"] == claim.threshold,
        f"the result was measured against another threshold, {result['threshold']!r}",
    )
    day.check(not result["details"].get("problems"), f"{result['details'].get('problems')}")
    day.lacks("the claim", "the claim can only be measured on a GPU")
