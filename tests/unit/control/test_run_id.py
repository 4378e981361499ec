"""Tests the random id in a run's folder."""

from pathlib import Path

import pytest

from megatron_ft.config.job import RunConfig
from megatron_ft.control.rundir import RUN_ID_NAME, RunDir, RunId
from megatron_ft.errors import ConfigError


def claimed(runs: Path, name: str) -> Path:
    run = RunDir.claim(RunConfig(dir=str(runs), name=name, resume="auto"), model_name="tiny", config_yaml="a: 1\n")
    run.release()
    return run.path


def test_every_run_has_its_own_and_keeps_it(tmp_path: Path) -> None:
    first, second = (RunId.read(claimed(tmp_path, name)) for name in ("first", "second"))
    assert first.run_id != second.run_id and not first.is_older
    (claimed(tmp_path, "first") / "checkpoints" / "iter_0000007").mkdir()
    assert RunId.read(claimed(tmp_path, "first")) == first
    (tmp_path / "first").rename(tmp_path / "renamed")
    assert RunId.read(claimed(tmp_path, "renamed")) == first


def test_a_run_that_is_older_than_the_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "old" / "checkpoints" / "iter_0000007").mkdir(parents=True)
    assert RunId.read(claimed(tmp_path, "old")).is_older
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    assert not RunId.read(claimed(tmp_path, "empty")).is_older


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"run_id": 3, "is_older": false}'),
        *(b'{"run_id": "x", "is_older": false}', b'{"run_id": "' + b"a" * 32 + b'", "is_older": 0}'),
    ],
)
def test_a_damaged_file_is_named_and_never_replaced(tmp_path: Path, content: bytes) -> None:
    path = claimed(tmp_path, "first") / RUN_ID_NAME
    path.write_bytes(content)
    for read in (lambda: RunId.read(path.parent), lambda: RunId.make(path.parent, is_older=False)):
        with pytest.raises(ConfigError, match=f"first/{RUN_ID_NAME}: must contain the random id of the run"):
            read()
    with pytest.raises(ConfigError, match=RUN_ID_NAME):
        claimed(tmp_path, "first")
    assert path.read_bytes() == content
    path.unlink()
    claimed(tmp_path, "first")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{RUN_ID_NAME}: must contain the random id of the run"):
        RunId.read(tmp_path)
