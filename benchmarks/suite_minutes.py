"""Records the tests that ``make test-all`` ran and their duration: ``python -m benchmarks.suite_minutes .cache/tests``.

The script reads the JUnit reports of the three steps of ``make test-all`` and writes
``results/test-all_<hardware>_<date>.json``. Seconds of a step are wall-clock time. Seconds of a part of the package are
the sum over its tests, which run on several workers.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.claims import RESULTS_DIR
from benchmarks.hardware import describe
from benchmarks.source import ROOT

STEPS = ("test", "extended", "timed")


def minutes(folder: Path) -> dict[str, Any]:
    """Read the report of each step in ``folder``, and return the counts and durations.

    Raises:
        FileNotFoundError: a step wrote no report, because the run was not complete.
    """
    steps = {name: _step(folder / f"{name}.xml") for name in STEPS}
    passed = not any(step["failed"] for step in steps.values())
    counts = Counter[str]()
    for step in steps.values():
        counts.update({name: step[name] for name in ("passed", "failed", "skipped")})
    figure = f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped; " + ", ".join(
        f"{name} {step['seconds'] / 60:.1f} min" for name, step in steps.items()
    )
    return {"id": "test-all", "passed": passed, "figure": figure, "steps": steps}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="suite_minutes", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder with the reports of make test-all")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR, help="folder for the result")
    arguments = parser.parse_args(argv)
    hardware = describe()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    date = f"{datetime.now(tz=timezone.utc):%Y-%m-%d}"
    result = {**minutes(arguments.folder), "date": date, "hardware": hardware, "commit": commit.stdout.strip()}
    path = arguments.out / f"test-all_{hardware['class']}_{date}.json"
    path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{result['figure']} -> {path}")
    return 0 if result["passed"] else 1


def _step(path: Path) -> dict[str, Any]:
    suite = ElementTree.parse(path).getroot()[0]
    seconds, tests = Counter[str](), Counter[str]()
    outcomes = Counter({"passed": 0, "failed": 0, "skipped": 0})
    failed = []
    for case in suite.iter("testcase"):
        part = _part(case.get("classname", ""))
        seconds[part] += float(case.get("time", 0))
        tests[part] += 1
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[outcome] += 1
        if outcome == "failed":
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    parts = {part: {"tests": tests[part], "worker_seconds": round(seconds[part], 1)} for part in sorted(tests)}
    return {**outcomes, "failures": failed, "seconds": float(suite.attrib["time"]), "parts": parts}


def _part(module: str) -> str:
    names = module.split(".")
    if names[-1] == "test_claims_quick":
        return "quick claims"
    return names[1] if names[0] == "tests" else names[0]


if __name__ == "__main__":
    sys.exit(main())
