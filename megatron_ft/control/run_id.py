"""The random id of a run (``run_id.json``), made when the run's folder is first claimed.

A folder can be renamed and another run can get the same name; the random id still distinguishes runs.
"""

import json
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_ft.durable import replace_file
from megatron_ft.errors import ConfigError
from megatron_ft.serde import parse_json

RUN_ID_NAME = "run_id.json"
_RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunId:
    """Identity of a run."""

    run_id: str
    """The random id as 32 hexadecimal digits."""
    is_older: bool = False
    """Whether the run already had checkpoints or windows when it got this id; they have format 1."""

    @classmethod
    def make(cls, run_dir: Path, *, is_older: bool) -> "RunId":
        """Return the id of the run in ``run_dir``, which this process has claimed; write a new one, durably, if there
        is none.

        Raises:
            ConfigError: the file exists and is damaged.
            OSError: the file cannot be written.
        """
        if (run_dir / RUN_ID_NAME).exists():
            return RunId.read(run_dir)
        made = cls(run_id=secrets.token_hex(16), is_older=is_older)
        # Durable before the first checkpoint refers to it: with another name the run would refuse its own state.
        replace_file(run_dir / RUN_ID_NAME, json.dumps(asdict(made)).encode() + b"\n")
        return made

    @classmethod
    def read(cls, run_dir: Path) -> "RunId":
        """Read the id of the run in ``run_dir``.

        Raises:
            ConfigError: the file is missing or damaged.
        """
        path = run_dir / RUN_ID_NAME
        advice = "restore it from a copy; manifest.json of each of the run's checkpoints also contains the run_id"
        try:
            content = parse_json(path.read_bytes())
            found = cls(run_id=content["run_id"], is_older=content["is_older"])
            if not _RUN_ID.fullmatch(found.run_id) or type(found.is_older) is not bool:
                raise ValueError("run_id must be 32 hexadecimal digits, and is_older true or false")
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: must contain the random id of the run: {error}; {advice}") from None
        return found
