"""Tests how output of Slurm is parsed, and how a node reacts to the state of the batch host."""

import threading

import pytest

from megatron_ft.control.slurm import batch_host, calls
from megatron_ft.control.slurm.calls import JobView, SlurmError, _parse_array_hosts, _parse_drained

SHOWN = (
    "JobId=2 JobName=lm UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Restarts=0 ExitCode=0:0 "
    "RunTime=00:00:31 ReqNodeList=(null) ExcNodeList=node[4-5] NodeList=node[1,3] BatchHost=node0 "
    "NumNodes=2 Command=/a b=c\n"
)


def test_a_job_whose_batch_host_has_died() -> None:
    job = JobView.parse(SHOWN)
    assert job == JobView("RUNNING", "node0", ("node1", "node3"), excluded=("node4", "node5"))
    assert not job.has_batch_host


def test_a_job_that_waits_has_no_nodes() -> None:
    assert JobView.parse("JobId=2 JobState=PENDING NodeList=(null)") == JobView("PENDING", "", ())


def test_an_answer_that_is_none_is_refused() -> None:
    with pytest.raises(SlurmError, match="no JobState"):
        JobView.parse("slurm_load_jobs error")


def test_nodes_that_are_none_are_refused() -> None:
    with pytest.raises(SlurmError, match=r"cannot read the list of nodes: NodeList=node\[1-: must be"):
        JobView.parse("JobId=2 JobState=RUNNING NodeList=node[1-")
    with pytest.raises(SlurmError, match=r"cannot read the list of nodes: ExcNodeList=node\[2-1\]: has a range"):
        JobView.parse("JobId=2 JobState=PENDING NodeList=(null) ExcNodeList=node[2-1]")


def test_nodes_that_are_drained() -> None:
    output = "node0 mixed\nnode1 draining\nnode1 draining\nnode2 drained*\nnode3 drng@\nnode4 down*\nnode5 idle\n"
    assert _parse_drained(output) == ["node1", "node2", "node3"]


def test_hosts_of_an_arrays_tasks() -> None:
    assert _parse_array_hosts("10 node3\n0 gpu-1.rack2\n") == {10: "node3", 0: "gpu-1.rack2"}
    assert _parse_array_hosts("") == {}


@pytest.mark.parametrize("text", ["N/A node3", "3", "[0-2] node3", "3 node3 node4", "\u0663 node3"])
def test_what_is_no_task_and_host_is_refused(text: str) -> None:
    with pytest.raises(SlurmError, match="a line must have a task index and a host"):
        _parse_array_hosts(text)


class Slurm:
    """Slurm with scripted answers."""

    def __init__(self, *answers: JobView | SlurmError) -> None:
        self.answers = list(answers)
        self.requeued: list[str] = []

    def view(self, job_id: str) -> JobView:
        answer = self.answers.pop(0)
        if isinstance(answer, SlurmError):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_host, "FIRST_SECONDS", 0.0)


def watch(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(calls, "requeue", slurm.requeued.append)
    monkeypatch.setattr(calls, "view_job", slurm.view)
    return batch_host.watch("17", threading.Event(), report=lambda _: None)


ALIVE, DEAD = JobView("RUNNING", "a", ("a", "b")), JobView("RUNNING", "a", ("b",))


def test_the_job_is_requeued_once_slurm_has_taken_the_batch_host_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(ALIVE, SlurmError("does not answer"), ALIVE, DEAD)
    assert watch(slurm, monkeypatch)
    assert (slurm.requeued, slurm.answers) == (["17"], [])


@pytest.mark.parametrize("state", ["COMPLETED", "PENDING", "CANCELLED"])
def test_a_job_that_runs_no_more_is_left_alone(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(ALIVE, JobView(state, "a", ("b",)))
    assert not watch(slurm, monkeypatch)
    assert slurm.requeued == []


def test_nothing_is_asked_once_somebody_else_goes_on() -> None:
    is_over = threading.Event()
    is_over.set()
    assert not batch_host.watch("17", is_over, report=lambda _: None)
