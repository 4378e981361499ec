"""Stores the results of ``tools/gpu_day.py``, a series of tests on a GPU. Writes a line when a stage ends, and a
record, an archive of logs and a table at the end."""

import datetime
import io
import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import hardware
from benchmarks.source import ROOT, source_digest
from tools.gpu.runner import Outcome

_PATH = re.compile(r"/(?:[\w.+-]+/)+[\w.+-]*")
_LOG_TAIL = 2000


def append_line(path: Path, outcome: Outcome) -> None:
    """Append the outcome of a stage to ``path`` as a JSON line, and print this line. It contains the end of the log if
    the stage failed."""
    entry = asdict(outcome) | {"log": outcome.log[-_LOG_TAIL:] if outcome.failed else ""}
    line = json.dumps(without_paths(entry))
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line, flush=True)


def keep(call: str, outcomes: Sequence[Outcome], *, out: Path, results_dir: Path) -> None:
    """Write the record ``<call>.json`` and the archive ``<call>-logs.tar.gz`` to ``out``.

    If a stage measured a claim of ``benchmarks/claims.yaml``, the archive also contains the result. If the stages ran
    on a GPU, also write the record to ``results_dir``.
    """
    record = make_record(call, outcomes)
    text = json.dumps(record, indent=2, sort_keys=True) + "\n"
    (out / f"{call}.json").write_text(text, encoding="utf-8")
    with tarfile.open(out / f"{call}-logs.tar.gz", "w:gz") as archive:
        for outcome in outcomes:
            content = outcome.log.encode()
            entry = tarfile.TarInfo(f"{call}/{outcome.stage}.txt")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
            for path in sorted(results_dir.glob(f"{outcome.stage}_*_{record['date']}.json")):
                archive.add(path, f"results/{path.name}")  # the stage has measured a claim
    if record["hardware"]["class"] != "cpu":
        results_dir.mkdir(parents=True, exist_ok=True)
        name = f"{record['id']}_{record['hardware']['class']}_{record['date']}.json"
        (results_dir / name).write_text(text, encoding="utf-8")


def make_record(call: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the outcomes of all stages in the format of a benchmark's result, without host names and paths."""
    passed = [outcome.stage for outcome in outcomes if not outcome.failed]
    others = [f"{outcome.stage} {outcome.status}" for outcome in outcomes if outcome.failed]
    record = {
        "id": f"gpu-day-{call}",
        "passed": bool(outcomes) and not others,
        "figure": f"{len(passed)} of {len(outcomes)} stages passed" + (f"; {', '.join(others)}" if others else ""),
        "threshold": "every stage passes",
        "counts": {"stages": len(outcomes), "passed": len(passed)},
        "details": {"stages": [{**asdict(outcome), "log": ""} for outcome in outcomes]},
        "wall_seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "source": source_digest(ROOT / "tools" / "gpu_day.py"),
        "hardware": hardware.describe(),
    }
    cleaned: dict[str, Any] = without_paths(record)
    return cleaned


def without_paths(value: Any) -> Any:
    """Return ``value`` with each absolute path ``/a/b/c`` in its strings replaced by ``<path>/c``."""
    if isinstance(value, str):
        return _PATH.sub(lambda match: f"<path>/{match.group().rstrip('/').rpartition('/')[2]}", value)
    if isinstance(value, dict):
        return {key: without_paths(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(entry) for entry in value]
    return value


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a table: a line for each stage with status, seconds, name and purpose, and a line for each problem."""
    lines = []
    for outcome in outcomes:
        lines.append(f"{outcome.status:<10}{outcome.seconds:>7.1f} s  {outcome.stage:<22}{outcome.about}")
        lines += [f"{'':22}{text[:200]}" for text in outcome.problems[:3]]
        lines += [f"{'':22}not run: {text[:200]}" for text in outcome.not_run]
    return "\n".join(lines)
