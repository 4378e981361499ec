"""The folder of a run, which at most one job claims at a time.

``<run.dir>/<run.name>/`` contains ``run_id.json``, ``config.yaml``, ``logs/``, ``checkpoints/`` and the files of sinks.
The random id distinguishes runs, even if a folder was renamed and another run has got its old name.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_ft.config.job import JobConfig, RunConfig
from megatron_ft.config.moved import with_present_keys
from megatron_ft.config.remembered import given_values, with_values
from megatron_ft.config.serialize import from_dict
from megatron_ft.durable import fsync_folder, replace_file
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.serde import parse_json

RUN_ID_NAME = "run_id.json"
CONFIG_NAME = "config.yaml"
_RUN_ID = re.compile(r"[0-9a-f]{32}")


def read_run_config(run_dir: Path, *, as_given: bool = False) -> JobConfig:
    """Read the configuration with which the newest job of the run in ``run_dir`` was started.

    Args:
        as_given: whether to return the values that the user gave instead of the values that the job derived from them.

    Raises:
        DataError: the file is missing, or contains no configuration.
    """
    import yaml

    path = run_dir / CONFIG_NAME
    try:
        text = path.read_text(encoding="utf-8")
        config = from_dict(with_present_keys(yaml.safe_load(text)))
        return with_values(config, given_values(text)) if as_given else config
    except (OSError, ValueError, AttributeError, yaml.YAMLError, ConfigError) as error:
        raise DataError(f"{path}: must contain the configuration of a run: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunId:
    """Identity of a run."""

    run_id: str
    """The random id as 32 hexadecimal digits."""
    is_older: bool = False
    """Whether the run had checkpoints or windows before it got this id. Those have format 1, without a random id."""

    @classmethod
    def make(cls, run_dir: Path, *, is_older: bool) -> "RunId":
        """Return the id of the run in ``run_dir``, which this process has claimed. If there is no id, write a new one
        to disk.

        Raises:
            ConfigError: the file exists and is damaged.
            OSError: the file cannot be written.
        """
        if (run_dir / RUN_ID_NAME).exists():
            return RunId.read(run_dir)
        made = cls(run_id=secrets.token_hex(16), is_older=is_older)
        # The id is on disk before a checkpoint contains it. If it were lost, the run would refuse its own checkpoints.
        replace_file(run_dir / RUN_ID_NAME, json.dumps(asdict(made)).encode() + b"\n")
        return made

    @classmethod
    def read(cls, run_dir: Path) -> "RunId":
        """Read the id of the run in ``run_dir``.

        Raises:
            ConfigError: the file is missing or damaged.
        """
        path = run_dir / RUN_ID_NAME
        advice = "restore this file from a copy; the manifest.json of each checkpoint also contains the run_id"
        try:
            content = parse_json(path.read_bytes())
            found = cls(run_id=content["run_id"], is_older=content["is_older"])
            if not _RUN_ID.fullmatch(found.run_id) or type(found.is_older) is not bool:
                raise ValueError("run_id must be 32 hexadecimal digits, and is_older true or false")
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: must contain the random id of the run: {error}; {advice}") from None
        return found


_CHECKPOINT_MANIFEST = "manifest.json"
"""Name of the last file that is written into a checkpoint's folder. It must equal the name in
``snapshot/storage/manifest.py``, which this package does not import."""
_METRICS = "metrics.jsonl"
"""Name of the file that gets a line for each trained iteration (``telemetry/sinks/jsonl.py``)."""
_GENERATIONS = "control/window_generations"
"""Name of a file that exists if windows of the run may be only in the memory of snapshot servers."""
_FAILED_START = "failed-start-"
_LOCK_FILE = ".lock"
_LOOK_SECONDS = 1.0
_RESUME = ("never", "must", "auto")


@dataclass
class RunDir:
    """A claimed run folder. The claim lasts until ``release`` or the end of the process."""

    path: Path
    resume_from: Path | None
    """The folder ``checkpoints`` if this job continues the run, otherwise None."""
    _lock: int

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def is_there(self) -> bool:
        """Whether the claimed folder is still at its path; true if the file system does not answer."""
        try:
            # The inode of the lock file is compared, because another folder may be at the path now.
            return os.path.samestat(os.stat(self.path / _LOCK_FILE), os.fstat(self._lock))
        except FileNotFoundError:
            return False
        except OSError:  # the server of the file system does not answer now
            return True

    @contextlib.contextmanager
    def watched(self, on_missing: Callable[[], None]) -> Iterator[None]:
        """Call ``on_missing`` in another thread each time the folder disappears during the ``with`` block."""
        is_over = threading.Event()

        def watch() -> None:
            was_there = True
            while not is_over.wait(_LOOK_SECONDS):
                is_there = self.is_there
                if was_there and not is_there:
                    on_missing()
                was_there = is_there

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            is_over.set()
            watcher.join()

    def release(self) -> None:
        """Release the claim, so that another job can claim the folder."""
        os.close(self._lock)

    @classmethod
    def claim(
        cls,
        run: RunConfig,
        *,
        model_name: str,
        config_yaml: str,
        may_be_in_memory: bool = False,
        keeps_config: bool = False,
    ) -> "RunDir":
        """Create or reopen the folder that ``run`` names, lock it, and write the run's random id and ``config.yaml``.

        Without ``run.name``, the folder gets the next free name ``<model_name>-001``, ``-002`` and so on. If an earlier
        job had another configuration, that job's file is kept as ``config-001.yaml`` and so on. A new run may have the
        name of a run that failed before its first trained iteration. The files of the failed run are then moved to
        ``failed-start-001`` and so on in the folder.

        Args:
            may_be_in_memory: whether the run's state may be in memory only, so that ``run.resume=must`` does not need a
                checkpoint in the folder.
            keeps_config: whether to keep an earlier job's ``config.yaml``, because this job does not train.

        Raises:
            ConfigError: the name is invalid, ``run.resume`` does not allow this state of the folder, or another job
                uses the folder.
        """
        _check(run)
        parent = Path(run.dir).absolute()
        try:
            _make(parent)
            path, existed = _number(parent, model_name) if run.name is None else _take(run, parent / run.name)
            fsync_folder(parent)
        except OSError as error:
            raise ConfigError.of(
                "run.dir", run.dir, f"must be a folder this user can read and write: {error}"
            ) from error
        # The folder is locked before anything in it is read or written.
        claimed = cls(path, None, _lock(path))
        try:
            claimed.resume_from = _resume(run, path, may_be_in_memory=may_be_in_memory) if existed else None
            if existed and run.resume == "never":
                _set_aside(path)
            RunId.make(path, is_older=_has_state(path))
        except ConfigError:
            claimed.release()
            raise
        for folder in ("logs", "checkpoints"):
            (path / folder).mkdir(exist_ok=True)
        if not (keeps_config and (path / CONFIG_NAME).exists()):
            _write_config(path, config_yaml)
        return claimed


def check_claim(run: RunConfig, *, may_be_in_memory: bool = False) -> None:
    """Check that ``RunDir.claim`` can claim the folder that ``run`` names now. Nothing is created or changed.

    Args:
        may_be_in_memory: whether the run's state may be in memory only, so that no checkpoint is needed.

    Raises:
        ConfigError: the claim would fail.
    """
    _check(run)
    parent = Path(run.dir).absolute()
    existing = next(folder for folder in (parent, *parent.parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        constraint = f"must be a folder this user can read and write, but {existing} is "
        raise ConfigError.of("run.dir", run.dir, constraint + ("read-only" if existing.is_dir() else "a file"))
    if run.name is None:
        return
    path = parent / run.name
    if path.exists() and not path.is_dir():
        raise ConfigError.of("run.name", run.name, f"must be a folder, but {path} is a file")
    if not path.is_dir():
        if run.resume == "must":
            raise _no_folder(run, path)
        return
    try:
        if is_claimed(path):
            raise _used(path)
    except OSError as error:
        raise ConfigError.of("run.name", run.name, f"must be a folder this user can read and write: {error}") from None
    _resume(run, path, may_be_in_memory=may_be_in_memory)


def _check(run: RunConfig) -> None:
    if run.resume not in _RESUME:
        raise ConfigError.of("run.resume", run.resume, f"must be one of {', '.join(_RESUME)}")
    if run.name is None:
        if run.resume == "must":
            raise ConfigError.of("run.name", None, "must name the run to continue, because run.resume=must is set")
        return
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,128}", run.name) or run.name.strip(".") == "":
        raise ConfigError.of("run.name", run.name, "must have 1 to 128 of the characters A-Z a-z 0-9 . _ -")


def _make(folder: Path) -> None:
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # Parents are synced first: an entry is durable only if the folder that contains it is durable.
    for made in reversed(missing):
        fsync_folder(made.parent)


def _number(parent: Path, model_name: str) -> tuple[Path, bool]:
    # Create the folder with the next number. Two jobs never get the same number.
    pattern = re.compile(re.escape(model_name) + r"-(\d{3,})")
    taken = [int(match.group(1)) for entry in os.listdir(parent) if (match := pattern.fullmatch(entry))]
    number = max(taken, default=0) + 1
    while True:
        path = parent / f"{model_name}-{number:03d}"
        try:
            # If two jobs try the same number, only one can create the folder; the other takes the next number.
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path, False


def _take(run: RunConfig, path: Path) -> tuple[Path, bool]:
    if run.resume == "must" and not path.is_dir():
        raise _no_folder(run, path)
    try:
        path.mkdir()
    except FileExistsError:
        return path, True
    return path, False


def _no_folder(run: RunConfig, path: Path) -> ConfigError:
    return ConfigError.of("run.name", run.name, f"must be a folder in {path.parent}, because run.resume=must")


def _used(path: Path) -> ConfigError:
    return ConfigError.of("run.name", path.name, f"is used by a running job ({path})")


def is_claimed(path: Path) -> bool:
    """Whether a running job has claimed the run's folder ``path``; False if the folder does not exist."""
    try:
        descriptor = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # The lock is shared, so that several processes can check at the same time.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock(path: Path) -> int:
    descriptor = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise _used(path) from None
    return descriptor


def _resume(run: RunConfig, path: Path, *, may_be_in_memory: bool) -> Path | None:
    if run.resume == "never":
        if _failed_to_start(path):
            return None
        constraint = (
            f"exists in {path.parent}; to continue it set run.resume=must or auto, otherwise choose another name"
        )
        raise ConfigError.of("run.name", run.name, constraint)
    checkpoints = path / "checkpoints"
    if _has_state(path):
        return checkpoints
    if run.resume == "must" and not may_be_in_memory:
        raise ConfigError.of("run.resume", "must", f"needs a checkpoint to continue from, but {checkpoints} has none")
    return None


def _has_state(path: Path) -> bool:
    """Whether a run's folder contains a checkpoint or a persisted window, valid or not."""
    folders = (path / "checkpoints", path / "windows")
    return any(not entry.name.startswith(".") for folder in folders if folder.is_dir() for entry in folder.iterdir())


def _failed_to_start(path: Path) -> bool:
    """Whether the run of a folder ended before its first trained iteration, and so has no state that could be lost."""
    known = (path / RUN_ID_NAME).exists() or {entry.name for entry in path.iterdir()} == {_LOCK_FILE}
    if not known or _has_state(path) or (path / _GENERATIONS).exists():
        return False
    metrics = path / _METRICS
    return not metrics.exists() or metrics.stat().st_size == 0


def _set_aside(path: Path) -> None:
    """Move the files of a run that failed before its first trained iteration to the subfolder ``failed-start-NNN``."""
    entries = [each for each in path.iterdir() if each.name != _LOCK_FILE and not each.name.startswith(_FAILED_START)]
    if not entries:
        return
    number = 1
    while (kept := path / f"{_FAILED_START}{number:03d}").exists():
        number += 1
    kept.mkdir()
    # The id moves last: if this process dies before, the next start still recognizes a run that failed to start.
    for entry in sorted(entries, key=lambda each: each.name == RUN_ID_NAME):
        entry.rename(kept / entry.name)


def has_complete_state(path: Path) -> bool:
    """Whether a run's folder contains a completely saved checkpoint or a persisted window, valid or not."""
    checkpoints = (path / "checkpoints").glob(f"iter_*/{_CHECKPOINT_MANIFEST}")
    return any(checkpoints) or any((path / "windows").glob("window_*"))


def _write_config(path: Path, config_yaml: str) -> None:
    target = path / CONFIG_NAME
    if target.exists():
        if target.read_text() == config_yaml:
            return
        number = 1
        while (kept := path / f"config-{number:03d}.yaml").exists():
            number += 1
        # A link instead of a rename: other ranks may read the file now, so it must not be missing for a moment.
        os.link(target, kept)
    replace_file(target, config_yaml.encode())
