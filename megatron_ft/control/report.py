"""The result of a job that has ended, in the form in which the controller sends it to the launcher. This module also
makes messages and records that describe the result. It reads and writes no files."""

import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_ft.control.membership.machine import describe_returncode, signal_name
from megatron_ft.control.membership.state import Failure, MembershipPolicy, Outcome, State, Step
from megatron_ft.events import NodeLost, NodeStartFailed, RankFailed, RanksRestarted, Record
from megatron_ft.framing import Message
from megatron_ft.serde import decode, encode

_NOT_KEPT = ("op", "rank", "start", "generation", "position", "planned")
_LONG = ("traceback", "log_tail")
# The result is sent in one frame (``framing.MAX_FRAME_BYTES``), which the tracebacks of thousands of ranks exceed.
_SHORT_LENGTH = 500
_OF_FIRST_ERROR = ("error", "traceback", "exit_code")


@dataclass
class JobResult:
    """Result of a job or of one of its generations, with details of the ranks that ended in the last generation."""

    outcome: Outcome
    reason: str
    first_failure: Failure | None
    details: dict[int, Message] = field(default_factory=dict)
    """Known facts about each rank's end, by ``node * ranks_per_node + local_rank``: ``number`` (its rank in the
    membership), ``node, returncode, at_seconds, traceback, error, exit_code, iteration, phase, log, log_tail``."""
    survived: tuple[str, ...] = ()
    """Reason for the end of each earlier generation."""
    num_reforms: int = 0
    """Number of earlier generations that ended without a restart: their ranks continued in their processes."""

    @property
    def is_complete(self) -> bool:
        """Whether the run is complete, so that no later job continues it."""
        # One report is enough: before it, all ranks have reached the last iteration and completed the last checkpoint.
        was_reported = any(about.get("is_complete", False) for about in self.details.values())
        return was_reported and self.outcome is not Outcome.FAILED

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON. To limit its size, only the first failed rank keeps traceback and log."""
        details = {rank: self._shortened(rank, about) for rank, about in self.details.items()}
        content: dict[str, Any] = encode(replace(self, details=details))
        return content

    def _shortened(self, rank: int, about: Message) -> Message:
        if self.first_failure is not None and self.first_failure.rank == rank:
            return about
        short = {name: value for name, value in about.items() if name not in _LONG}
        return {name: value[:_SHORT_LENGTH] if isinstance(value, str) else value for name, value in short.items()}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "JobResult":
        """Make a ``JobResult`` from JSON that ``to_json`` has returned."""
        details = {int(rank): about for rank, about in content["details"].items()}
        found: JobResult = decode(cls, {**content, "details": {}})
        return replace(found, details=details)

    @classmethod
    def of(cls, state: State, reason: str, details: dict[int, Message]) -> "JobResult":
        """Make the result of a job from ``state``, what the controller knew when the job ended."""
        firsts = [Failure.first_of(failures) for failures in state.survived]
        survived = tuple("nodes joined or left on request" if first is None else first.detail for first in firsts)
        return cls(state.outcome, reason, state.first_failure, details, survived, state.num_reforms)


def add_failure_report(about: Message, report: Message, *, caused_by_us: bool) -> None:
    """Add the report of a rank's end to ``about``, the rank's entry of ``JobResult.details``.

    Only the rank's first error is kept, because a rank that cannot continue after an error raises a second one.

    Args:
        caused_by_us: whether the control plane has killed the rank, or the rank's node counts as lost.
    """
    if "error" in about:
        report = {name: value for name, value in report.items() if name not in _OF_FIRST_ERROR}
    # The exception and the exit that follows are separate reports. The earlier time counts, because it orders ranks.
    failed_at_seconds = min(report["at_seconds"], about.get("at_seconds", report["at_seconds"]))
    about.update({name: value for name, value in report.items() if name not in _NOT_KEPT})
    about["at_seconds"] = failed_at_seconds
    about["caused_by_us"] = about.get("caused_by_us", caused_by_us)


_WIDTH = 100
_MAX_LINES = 40
_TAIL_LINES = 15
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "remote process exited")
"""Texts that error messages of gloo and NCCL contain if another rank has ended."""
_ENDING_FAULTS = ("kill", "exit", "raise")
"""Actions of failpoints (injected faults) that end the process, so that its node leaves the membership."""
# Keys that the advice leaves out: it adds the run's keys, faults must not be injected again, the socket may be gone.
_NOT_AGAIN = ("run.name=", "run.resume=", "run.dir=", "testing.failpoints=", "launch.forkserver_socket=")


def failure_screen(end: JobResult, run_dir: Path, resume: str, node_log: str = "") -> str:
    """Return a text about the first rank that died, the cause, all other failed ranks, the logs, and how to resume.

    Args:
        node_log: last lines of a lost node's own log, shown if the first failure is not the failure of a rank.
    """
    first = end.first_failure
    rank = first.rank if first else None
    details = end.details.get(rank, {}) if rank is not None else {}
    body = node_log if rank is None else details.get("traceback") or _last_lines(details)
    about = [_headline(end, rank, details), _indent(body), _others(end, rank), _survived(end)]
    blocks = [*about, _logs(run_dir, details), resume]
    rule = "=" * _WIDTH
    return "\n".join([rule, *("\n".join(block.splitlines()) + "\n" for block in blocks if block), rule])


def _headline(end: JobResult, rank: int | None, details: Message) -> str:
    if rank is None:
        return f"THE JOB FAILED: {end.reason}"
    where = f"node {details['node']}" if "node" in details else "node unknown"
    if "iteration" in details:
        where += f", iteration {details['iteration']}"
        where += f", phase {details['phase']}" if details["phase"] != "iteration" else ""
    return f"RANK {_number(rank, details)} FAILED FIRST ({where}), at {_clock(details)}\n  {_how(details)}"


def _number(rank: int, details: Message) -> int:
    return int(details.get("number", rank))


def _last_lines(details: Message) -> str:
    hint = ""
    if details.get("returncode") == -9:
        hint = "SIGKILL was sent by a kill command, by a failpoint, or by the kernel when out of memory (see dmesg).\n"
    lines = details.get("log_tail", "").splitlines()[-_TAIL_LINES:]
    return hint + "\n".join(["The last lines of its log:", *lines] if lines else ["Its log is empty."])


def _how(details: Message) -> str:
    how = f"raised {_short(details['error'])}" if "error" in details else details.get("hung", "")
    if "returncode" in details and (not how or details["returncode"] < 0):
        how += (", " if how else "") + describe_returncode(details["returncode"])
    return how or "ended"


def _short(text: str, limit: int = 160) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _clock(details: Message) -> str:
    at_seconds = float(details.get("at_seconds", 0.0))
    return time.strftime("%H:%M:%S", time.localtime(at_seconds)) + f".{int(at_seconds * 1000) % 1000:03d}"


def _indent(text: str) -> str:
    lines = [line for line in text.rstrip().splitlines() if line.strip(" ~^") or not line.strip()]
    if len(lines) > _MAX_LINES:
        lines = [
            *lines[: _MAX_LINES // 3],
            f"... {len(lines) - _MAX_LINES} lines left out ...",
            *lines[-2 * _MAX_LINES // 3 :],
        ]
    return "\n".join(f"  {line}" for line in lines)


def _others(end: JobResult, first: int | None) -> str:
    begin = end.details.get(first, {}).get("at_seconds", 0.0) if first is not None else 0.0
    failed = [(about["at_seconds"], rank, about) for rank, about in end.details.items() if rank != first]
    failed = [entry for entry in failed if not entry[2]["caused_by_us"] and not entry[2].get("done")]
    # Clocks of nodes differ, so a rank that died later can have an earlier time.
    delays = [(max(0.0, at - begin), rank, about) for at, rank, about in failed]
    delays.sort(key=lambda entry: entry[:2])
    followed = sorted(_number(rank, about) for _, rank, about in delays if _follows(about))
    delays = [entry for entry in delays if not _follows(entry[2])]
    lines = [f"  rank {_number(rank, about)}, {delay:.3f} s later: {_how(about)}" for delay, rank, about in delays[:8]]
    if len(delays) > 8:
        lines.append(f"  and {len(delays) - 8} more failed ranks")
    if followed:
        ranks = f"{'ranks' if len(followed) > 1 else 'rank'} {_ranges(followed)}"
        lines.append(f"  failed as a consequence, because another rank closed a connection (see their logs): {ranks}")
    ours = {rank: about for rank, about in end.details.items() if about["caused_by_us"] and rank != first}
    ended = sorted(_number(rank, about) for rank, about in ours.items())
    if ended:
        lines.append(f"  killed by the launcher: {'ranks' if len(ended) > 1 else 'rank'} {_ranges(ended)}")
    return "\n".join(["The other ranks:", *lines]) if lines else ""


def _follows(details: Message) -> bool:
    """Return whether a rank's error is a consequence of the end of another rank."""
    return any(part in details.get("error", "") for part in _LOST_PEER)


def _survived(end: JobResult) -> str:
    lines = [f"  generation {number}: {reason}" for number, reason in enumerate(end.survived)][-8:]
    again = f"Earlier generations (restarts of all ranks: {len(end.survived) - end.num_reforms}"
    went_on = f", changes of nodes without a restart: {end.num_reforms}" if end.num_reforms else ""
    return "\n".join([f"{again}{went_on}):", *lines]) if lines else ""


def _ranges(ranks: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def _logs(run_dir: Path, details: Message) -> str:
    log = details.get("log")
    return (f"Its log:  {log}\n" if log else "") + f"All logs: {run_dir / 'logs'}"


def resume_advice(command: Sequence[str], run_dir: Path, *, has_checkpoint: bool, fails_again: bool = False) -> str:
    """Return a text for the user with the command that continues the run.

    Args:
        command: the command that started this job, ``sys.argv`` with the interpreter.
        fails_again: whether the continued run would end with the same error if the user changes nothing.
    """
    kept = [word for word in command if not word.lstrip("+").startswith(_NOT_AGAIN)]
    mode = "must" if has_checkpoint else "auto"
    line = shlex.join([*kept, f"run.dir={run_dir.parent}", f"run.name={run_dir.name}", f"run.resume={mode}"])
    note = "" if has_checkpoint else " (it saved no checkpoint, so it starts at iteration 0)"
    first = ", first fix the cause that the error names. Otherwise this command fails again" if fails_again else ""
    return f"To continue this run{note}{first}:\n  {line}"


def restart_records(step: Step, details: dict[int, Message], policy: MembershipPolicy) -> list[Record]:
    """Return records of the failures that ended a generation, and then the record of the restart of all ranks.

    Args:
        details: how the ranks of that generation ended, see ``JobResult.details``.
    """
    state = step.state
    first = Failure.first_of(state.survived[-1])
    assert first is not None, "no failure preceded the restart of the ranks"
    failed = _failed_records(JobResult(Outcome.FAILED, step.reason, first, details), policy)
    restarted = RanksRestarted(
        generation=state.generation,
        reason=step.reason,
        failed_ranks=tuple(event.rank for event in failed),
        iteration=first.iteration if first.rank is not None else _latest_iteration(details),
        num_restarts_left=policy.max_restarts - state.num_restarts,
        nodes=state.members,
    )
    return [*_lost_nodes(state.survived[-1]), *failed, restarted]


def _latest_iteration(details: dict[int, Message]) -> int:
    return max((about.get("iteration") or 0 for about in details.values()), default=0)


def lost_records(step: Step, details: dict[int, Message], policy: MembershipPolicy) -> list[Record]:
    """Return records of the failures that ended a membership. Errors that these failures caused in further ranks have
    no record, because those ranks continue.

    Args:
        details: how the ranks of that membership ended, see ``JobResult.details``.
    """
    failures = step.state.survived[-1]
    dead = {
        failure.rank: _death(failure, details.get(failure.rank)) for failure in failures if failure.rank is not None
    }
    dying = _failed_records(JobResult(Outcome.FAILED, step.reason, Failure.first_of(failures), dead), policy)
    return [*_lost_nodes(failures), *dying]


class InjectedFaults:
    """Faults that tests injected and that have ended a process of the job, collected from the job's records."""

    def __init__(self) -> None:
        self._fired: set[tuple[str, int]] = set()
        """Pairs of a failpoint (an injected fault), as configured, and the node whose process it ended."""

    def is_news(self, record: Message) -> bool:
        """Process a record. Return False for a record that wrongly reports that a fault was not injected.

        If a fault has ended a process, the process that replaces it has the same failpoint. The new process does not
        know that the fault was injected before, so it reports that the fault was not injected.
        """
        about = (record.get("failpoint"), record.get("node"))
        if record.get("kind") == "failpoint_hit" and record.get("action") in _ENDING_FAULTS:
            self._fired.add(about)
        return record.get("kind") != "failpoint_unfired" or about not in self._fired


def failed_start_records(step: Step) -> list[Record]:
    """Return a record for each node whose failed start the controller has detected in ``step``."""
    return [
        NodeStartFailed(node=failed.node, reason=failed.reason, starts_again=failed.starts_again)
        for failed in step.state.failed_starts
    ]


def end_records(end: JobResult, policy: MembershipPolicy) -> list[Record]:
    """Return the records of the failures that ended a job."""
    first = [] if end.first_failure is None else [end.first_failure]
    return [*_lost_nodes(first), *_failed_records(end, policy)]


def _lost_nodes(failures: Iterable[Failure]) -> list[Record]:
    lost = [(failure, failure.node) for failure in failures if failure.rank is None]
    return [
        NodeLost(
            time_unix_seconds=failure.at_seconds,
            node=node,
            reason=failure.detail.removeprefix(f"node {node} was lost: "),
        )
        for failure, node in lost
        if node is not None
    ]


def _death(failure: Failure, details: Message | None) -> Message:
    # Return the details of a rank's end. ``failure`` gives the cause if there are no details, or if the control plane
    # killed the rank because of this failure, for example because the rank had not reported its position.
    number = {} if failure.number is None else {"number": failure.number}
    own = {"at_seconds": failure.at_seconds, "iteration": failure.iteration or None}
    own |= {"hung": failure.detail, **number}
    if details is None:
        return {**own, "caused_by_us": False}
    return {**own, **details, "caused_by_us": False} if details["caused_by_us"] else details


def _failed_records(end: JobResult, policy: MembershipPolicy) -> list[RankFailed]:
    """Return a record for each rank that failed by itself, beginning with the first failure. There is no record for
    ranks that the launcher ended."""
    first = end.first_failure.rank if end.first_failure else None
    failed = [item for item in end.details.items() if not item[1]["caused_by_us"] and not item[1].get("done")]
    return [
        _failed_record(_number(rank, details), details, first=rank == first, node=policy.node_of(rank))
        for rank, details in sorted(failed, key=lambda item: (item[0] != first, item[1]["at_seconds"]))
    ]


def _failed_record(rank: int, details: Message, *, first: bool, node: int) -> RankFailed:
    returncode = details.get("returncode")
    return RankFailed(
        time_unix_seconds=details["at_seconds"],
        rank=rank,
        node=node,
        exit_code=returncode if returncode is not None and returncode >= 0 else None,
        signal=signal_name(-returncode) if returncode is not None and returncode < 0 else None,
        first=first,
        is_consequence=not first and _follows(details),
        phase=details.get("phase"),
        iteration=details.get("iteration"),
        error=_short(details["error"]) if "error" in details else details.get("hung"),
    )
