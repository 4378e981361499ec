"""``python -m megatron_ft.testing.dummy_job SPEC.json``: a job of dummy ranks whose sink is a file of JSON lines.

``SPEC.json`` holds ``config`` (JSON of ``JobConfig``), ``entry``, ``preload`` and ``sidecars``.
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
    """Writes every record to ``records.jsonl``, a new file for each launcher, and a line to ``consoles`` for each."""

    def __init__(self, config: JobConfig, run_dir: Path, *, world_size: int) -> None:
        self._file = (run_dir / "records.jsonl").open("w")
        with (run_dir / "consoles").open("a") as consoles:
            consoles.write(f"{os.getpid()}\n")

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self, exit_code: int, reason: str) -> None:
        """The run has ended."""
        self.write({"kind": "closed", "exit_code": exit_code, "reason": reason})
        self._file.close()


def main() -> int:
    """Run the job that the file named on the command line describes."""
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
