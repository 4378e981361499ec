"""Tests the command: the calls that it makes, when it begins, and what it refuses. ``test_injecting`` has real
processes."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ft.failures.injecting import Injector
from tests.helpers.keys import grouped
from tests.unit.tools.test_operating import FakeJob
from tools import inject_failures

CONFIG = grouped(ranks_per_node=2, num_nodes=2, num_spare_nodes=0, max_nodes=4)
TRACE = "0,add,a\n0,add,b\n60000,remove,b\n120000,add,c\n"
Calls = list[tuple[Any, ...]]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    made = FakeJob(tmp_path)
    (tmp_path / "config.yaml").write_text(json.dumps(CONFIG))  # JSON is YAML
    yield made
    made.server.stop()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Return the calls of the injector."""
    found: Calls = []

    def noted(name: str, answer: Any) -> Callable[..., Any]:
        def method(injector: Injector, *arguments: Any, **about: Any) -> Any:
            assert injector.ranks_per_node == 2
            found.append((name, *arguments, about.get("at_iteration")))
            return answer

        return method

    answers = dict.fromkeys(("kill", "partition", "fail_disk", "drain", "add")) | {"stop": ["rank-00002.log"]}
    for name, answer in answers.items():
        monkeypatch.setattr(Injector, name, noted(name, answer))
    monkeypatch.setattr(Injector, "replay", noted("replay", ["event 1: add of nodes [1]: refused"]))
    return found


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("--kill 1 0", ("kill", [1, 0], None)),
        ("--stop 1 --for 2.5", ("stop", [1], 2.5, None)),
        ("--stop 1", ("stop", [1], None, None)),
        ("--partition 1 0 --for 2", ("partition", [1, 0], 2.0, None)),
        ("--disk-error 1 --for 2", ("fail_disk", [1], 2.0, None)),
        ("--drain 1", ("drain", 1, None)),
        ("--add 3", ("add", 3, None)),
    ],
)
def test_each_option_is_one_failure(
    job: FakeJob, calls: Calls, words: str, call: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert inject_failures.main([str(job.folder), *words.split()]) == 0
    assert calls == [call]
    output = capsys.readouterr().out
    assert "all failures were injected" in output
    assert ("rank-00002.log ended while it was stopped" in output) is ("--stop" in words)


def test_it_begins_once_the_iteration_is_reported(job: FakeJob, calls: Calls) -> None:
    metrics = job.folder / "metrics.jsonl"
    metrics.write_text('{"iteration": 4}\n{"iteration": 5')  # a line that is being written

    def finish() -> None:
        assert calls == []
        with metrics.open("a") as file:
            file.write('}\n{"kind": "other"}\n')

    writer = threading.Timer(0.3, finish)
    writer.start()
    assert inject_failures.main([str(job.folder), "--kill", "1", "--at-iteration", "5"]) == 0
    writer.join()
    assert calls == [("kill", [1], 5)]


def test_a_job_that_ends_before_the_iteration_is_reported(
    job: FakeJob, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    ender = threading.Timer(0.3, job.path.unlink)
    ender.start()
    assert inject_failures.main([str(job.folder), "--kill", "1", "--at-iteration", "5"]) == 8
    ender.join()
    assert calls == [] and "ended after iteration 0, before --at-iteration=5" in capsys.readouterr().err


def test_a_trace_is_replayed_and_what_failed_ends_it_with_8(
    job: FakeJob, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = job.folder / "trace.csv"
    trace.write_text(TRACE)
    assert inject_failures.main([str(job.folder), "--trace", str(trace), "--scale", "0.5", "--minutes", "3"]) == 8
    ((name, schedule, _),) = calls
    assert (name, schedule.most_nodes, schedule.duration_seconds) == ("replay", 4, 90.0), "4 nodes of nodes.max_nodes"
    output = capsys.readouterr()
    assert "nodes at the start: 2 of 4; departures: 1" in output.out and "some failures were not injected" in output.out
    assert "not injected: event 1: add of nodes [1]: refused" in output.err


def test_a_trace_that_begins_with_other_nodes_is_refused(
    job: FakeJob, calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = job.folder / "trace.csv"
    trace.write_text(TRACE)
    assert inject_failures.main([str(job.folder), "--trace", str(trace), "--most-nodes", "1"]) == 8
    assert calls == [] and "members=[0, 1]: must be nodes 0 to 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--kill 1 --for 2", 2, "--for=2.0: can only be used with --stop, --partition or --disk-error"),
        ("--stop 1 --for 0", 2, "--for=0.0"),
        ("--stop 1 --for nan", 2, "--for=nan"),
        (
            "--partition 1",
            2,
            "--for=None: must be given with --partition and --disk-error, because these failures must end",
        ),
        ("--disk-error 1 --for 0", 2, "--for=0.0: must be finite and above 0"),
        ("--add 1 --minutes 2", 2, "--minutes=2.0: can only be used with --trace"),
        ("--add 1 --most-nodes 2", 2, "--most-nodes=2: can only be used with --trace"),
        ("--trace none.csv", 3, "none.csv: cannot be read"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    job: FakeJob, calls: Calls, words: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inject_failures.main([str(job.folder), *words.split()]) == code
    assert calls == [] and message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "launch: 3", "launch: {ranks_per_node: 1}", "launch: [", '{"launch": '])
def test_a_run_without_a_sound_configuration_is_refused(job: FakeJob, calls: Calls, content: str) -> None:
    (job.folder / "config.yaml").write_text(content)
    assert inject_failures.main([str(job.folder), "--kill", "1"]) == 3
    assert calls == []


def test_a_folder_without_a_job_is_refused(tmp_path: Path, calls: Calls) -> None:
    assert inject_failures.main([str(tmp_path), "--kill", "1"]) == 8
    assert calls == [] and list(tmp_path.iterdir()) == []


def test_one_failure_per_command(job: FakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--kill", "1", "--drain", "2"]):
        with pytest.raises(SystemExit):
            inject_failures.main([str(job.folder), *words])
    with pytest.raises(SystemExit):
        inject_failures.main(["--help"])
    assert "testing.failpoints" in capsys.readouterr().out, "where phases are named"
