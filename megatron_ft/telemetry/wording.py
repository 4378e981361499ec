"""Records in words, for people who watch a run."""

import math
from dataclasses import dataclass

from megatron_ft import events
from megatron_ft.events import Record

_MOST_PROCESSES_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One line about an event."""

    level: str
    """``info``, ``good``, ``warning`` or ``bad``."""
    text: str
    """The line, without a time."""


def note(record: Record) -> Note | None:
    """What to tell about ``record``; ``None`` for records that are shown in other ways or not at all."""
    match record:
        case events.Metrics() | events.ExpertLoad() | events.StateDigest():
            return None
        case events.RunStarted():
            return Note(level="info", text=_started(record))
        case events.RanksReady():
            return Note(level="info", text=f"all ranks ready after {seconds(record.seconds)}{_processes(record)}")
        case events.IterationSkipped():
            return Note(level="warning", text=f"iteration {record.iteration} skipped: {record.reason}")
        case events.Evaluation():
            return Note(level="info", text=f"evaluation after iteration {record.iteration}: loss {record.loss:.4f}")
        case events.PlacementInForce():
            return Note(level="info", text=f"placement from iteration {record.iteration} on: {record.reason}")
        case events.MembershipChanged():
            joining = f", {list(record.joining)} of them joining," if record.joining else ""
            where = f"{record.world_size} ranks on nodes {list(record.nodes)}{joining}"
            text = f"{where} go on after iteration {record.iteration}"
            return Note(level="warning", text=f"{text} ({seconds(record.seconds)}): {record.reason}")
        case events.CheckpointSaved():
            return Note(level="good", text=f"checkpoint of iteration {record.iteration} saved{_cost(record)}")
        case events.CheckpointFailed():
            return Note(level="bad", text=f"checkpoint of iteration {record.iteration} failed: {record.error}")
        case events.CheckpointLoaded():
            different = "".join(f"; {difference}" for difference in record.differences)
            level = "warning" if different else "good"
            return Note(level=level, text=f"checkpoint of iteration {record.iteration} loaded{different}")
        case events.SnapshotPlanned() | events.WindowCommitted() | events.WindowDelayed() | events.SnapshotProblem():
            return _snapshot(record)
        case events.UpstreamLogPlanned():
            text = f"upstream log: {record.iterations_kept} iterations, {size(record.log_bytes)} a rank"
            return Note(level="info", text=text)
        case events.UpstreamLogFull():
            text = f"upstream log is full from iteration {record.iteration} on"
            return Note(level="warning", text=f"{text}: no stage can go back alone before a later window is committed")
        case events.RecoveryDecided():
            declined = "".join(f"; not used: {reason}" for reason in record.declined)
            text = f"generation {record.generation} goes on after iteration {record.iteration} from {record.rung}"
            return Note(level="info", text=text + declined)
        case events.RecoveryChosen():
            level = "warning" if record.declined else "info"
            declined = "".join(f"; not used: {reason}" for reason in record.declined)
            return Note(level=level, text=f"continues from {record.source}, iteration {record.iteration}{declined}")
        case events.WindowReplayed():
            text = f"replayed {record.num_iterations} iterations up to {record.iteration} in {seconds(record.seconds)}"
            return Note(level="good", text=text)
        case events.StageRecovery():
            return _stage_recovery(record)
        case events.LossSpike():
            ratio = f"loss {record.loss:.4f} against a median of {record.median:.4f}"
            policy = f" ({record.policy})" if record.policy else ""
            return Note(level="warning", text=f"loss spike in iteration {record.iteration}: {ratio}{policy}")
        case events.FailpointHit():
            where = f"in {record.phase} of iteration {record.iteration}" + _of_rank(record.rank)
            return Note(level="warning", text=f"injected fault: {record.action} {where}")
        case events.FailpointUnfired():
            text = f"fault never injected: {record.failpoint}{_of_rank(record.rank)}"
            return Note(level="warning", text=text)
        case events.RankFailed():
            return Note(level="bad", text=_rank_failed(record))
        case events.NodeLost():
            return Note(level="bad", text=f"node {record.node} was lost: {record.reason}")
        case events.NodeStartFailed():
            again = "starting it again" if record.starts_again else "it is not started again"
            return Note(level="bad", text=f"node {record.node} did not join: {record.reason}; {again}")
        case events.ControllerWaits():
            text = f"the controller cannot write ({record.problem}): no loss is dealt with until there is room"
            return Note(level="bad", text=text)
        case events.ControllerGoesOn():
            return Note(level="good", text=f"there is room: the controller goes on after {seconds(record.seconds)}")
        case events.RunFolderMissing():
            text = f"the run's folder was deleted or moved away: {record.path}; nothing new is kept, and the next loss"
            return Note(level="bad", text=f"{text} ends the job: put it back, or stop the job")
        case events.RanksRestarted():
            return Note(level="warning", text=_ranks_restarted(record))
        case events.AlertRaised():
            return Note(level="bad", text=f"alert: {_alert(record)}")
        case events.AlertCleared():
            return Note(level="good", text=f"no longer an alert: {_alert(record)}")
        case events.StopRequested():
            return Note(level="warning", text=f"stop requested ({record.source}): finishing the iteration")
        case events.RunFinished():
            return Note(level="good", text=f"run finished: {record.reason}")
        case events.RunStopped():
            return Note(level="bad", text=f"run stopped: {record.reason} (exit code {record.exit_code})")
        case events.SinkFailed():
            return Note(level="bad", text=f"{record.sink} takes no records: {record.error}")
        case events.SinkRecovered():
            lost = f", {record.num_lost_records} records lost" if record.num_lost_records else ", nothing lost"
            return Note(level="good", text=f"{record.sink} works again{lost}")
        case events.RecordRefused():
            return Note(level="bad", text=f"invalid record: {record.problem}")
        case events.LogHealed():
            text = f"{record.file} ended in half a line; cut off its {record.num_dropped_bytes} bytes"
            return Note(level="warning", text=text)
    return Note(level="info", text=record.kind.replace("_", " "))


def _snapshot(
    record: events.SnapshotPlanned | events.WindowCommitted | events.WindowDelayed | events.SnapshotProblem,
) -> Note | None:
    match record:
        case events.SnapshotPlanned():
            text = f"snapshots: window of {record.window_iterations} iterations, {size(record.window_bytes)} a rank"
            return Note(level="info", text=text)
        case events.WindowDelayed():
            behind = size(record.replicating_bytes)
            text = f"window after iteration {record.iteration} waits for peers, {behind} behind"
            return Note(level="warning", text=text)
        case events.SnapshotProblem():
            return Note(level="bad", text=f"snapshot problem on node {record.node} ({record.what}): {record.error}")
    return None


def _stage_recovery(record: events.StageRecovery) -> Note | None:
    """Of those that compute: the others stand still, and there is a record of each."""
    if record.role != "replays":
        return None
    text = f"rank {record.rank} of stage {record.stage} replayed {record.num_iterations} iterations"
    return Note(level="good", text=f"{text} up to {record.iteration} in {seconds(record.seconds)}")


def seconds(duration: float) -> str:
    """``0.42 s``, ``12.3 s``, ``4:07``, ``1:02:03`` or ``3d 04:05:06``."""
    if duration < 60 or not math.isfinite(duration):
        return f"{duration:.2f} s" if duration < 10 else f"{duration:.1f} s"
    return clock(duration)


def clock(duration: float) -> str:
    """``0:07``, ``4:07``, ``1:02:03`` or ``3d 04:05:06``."""
    minutes, second = divmod(int(duration), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}:{second:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def size(num_bytes: float) -> str:
    """``512 B``, ``3.2 MB`` (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def _started(record: events.RunStarted) -> str:
    ranks = f"{record.world_size} rank{'s' * (record.world_size != 1)}"
    nodes = f" on {record.num_nodes} nodes" if record.num_nodes and record.num_nodes > 1 else ""
    device = f", {record.device}" if record.device else ""
    origin = ""
    if record.resumed_from_iteration is not None:
        origin = f", continues after iteration {record.resumed_from_iteration}"
    return f"{record.run_name}: {record.model}, {ranks}{nodes}{device}{origin}"


def _processes(record: events.RanksReady) -> str:
    process_ids = record.process_ids or ()
    if not 0 < len(process_ids) <= _MOST_PROCESSES_NAMED:
        return ""
    return f"; process ids by rank: {' '.join(map(str, process_ids))}"


def _cost(record: events.CheckpointSaved) -> str:
    parts = [size(record.num_bytes)] if record.num_bytes is not None else []
    parts += [f"in {seconds(record.seconds)}"] if record.seconds is not None else []
    return f": {' '.join(parts)}" if parts else ""


def _of_rank(rank: int | None) -> str:
    return f", rank {rank}" if rank is not None else ""


def _rank_failed(record: events.RankFailed) -> str:
    node = f" on node {record.node}" if record.node is not None else ""
    ending = record.signal or (f"exit code {record.exit_code}" if record.exit_code is not None else "lost")
    when = f" in iteration {record.iteration}" if record.iteration is not None else ""
    first = ", the first to fail" if record.first else ""
    error = f": {record.error}" if record.error else ""
    return f"rank {record.rank}{node} died{when} ({ending}{first}){error}"


def _ranks_restarted(record: events.RanksRestarted) -> str:
    where = f" in iteration {record.iteration}" if record.iteration else ""
    left = f"{record.num_restarts_left} more without progress"
    return f"starting all ranks again (generation {record.generation}; {left}): {record.reason}{where}"


def _alert(record: events.AlertRaised | events.AlertCleared) -> str:
    value, limit = record.value, record.limit
    rank = record.rank if isinstance(record, events.AlertRaised) else None
    who = "the slowest rank" if rank is None else f"rank {rank} on node {record.node}"
    told = {
        "single_loss_survival": f"the job goes on after the loss of one failure domain with probability {value:.3f}",
        "stall_share": f"training waits for captures for {100 * value:.1f} % of its iterations",
        "windows_behind": f"{value:.1f} windows are due and none was committed: peers or storage are behind",
        "free_disk_share": f"{100 * value:.1f} % of the run's file system are free",
        "slowest_rank_over_median": f"{who} takes {value:.1f} times as long as the median rank for the same work",
    }
    return f"{told.get(record.alert, record.alert)} (telemetry.alert_{record.alert}={limit:g})"
