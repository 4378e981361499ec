"""Runs a job whose ranks have no model: ``python -m megatron_ft.testing.dummy_job SPEC.json``. The job writes its
records to a file of JSON lines.

``SPEC.json`` contains ``config`` (JSON of ``JobConfig``), ``entry``, ``preload`` and ``sidecars``.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import from_dict
from megatron_ft.control.launcher import launch
from megatron_ft.errors import MegatronFtError


class FileSinks:
    """Writes the records of a job to ``records.jsonl``. Each launcher (process that starts the job) overwrites this
    file, and appends its process id to the file ``consoles``."""

    def __init__(self, config: JobConfig, run_dir: Path, *, world_size: int) -> None:
        self._file = (run_dir / "records.jsonl").open("w")
        with (run_dir / "consoles").open("a") as consoles:
            consoles.write(f"{os.getpid()}\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record to ``records.jsonl``."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self, exit_code: int, reason: str, *, is_complete: bool) -> None:
        """Write a record about the end of the run, and close ``records.jsonl``."""
        self.write({"kind": "closed", "exit_code": exit_code, "reason": reason})
        self._file.close()


def main() -> int:
    """Run the job that the file ``SPEC.json`` describes, and return its exit code."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    config = from_dict(spec["config"])
    command = ["python", "pretrain_moe.py"]
    entry = f"megatron_ft.testing.dummy_rank:{spec['entry']}"
    try:
        return launch(
            config,
            "a: 1\n",
            open_sinks=FileSinks,
            entry=entry,
            preload=spec["preload"],
            command=command,
            sidecars=spec["sidecars"],
        )
    except MegatronFtError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
