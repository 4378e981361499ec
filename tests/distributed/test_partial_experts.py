"""Tests jobs whose windows leave out experts: from which state they continue, and what they count as lost."""

import itertools
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ft.planning.snapshot.expert_choice import Sequential
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.testing.jobs import JobResult, run_job
from tests.distributed.test_replaced_nodes import run_killing_nodes
from tests.helpers.sharing import chosen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_ITERATIONS = 14
JOB = (
    "model=moe_micro",
    "precision=bf16",
    f"training.train_iterations={NUM_ITERATIONS}",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.eval_interval_iterations=0",
    "training.digest_interval_iterations=1",
    "telemetry.log_interval_iterations=1",
    "telemetry.wandb=disabled",
    "run.name=job",
    "recovery.max_restarts=3",
)
PARTIAL = (
    "snapshot=partial_experts",
    "snapshot.num_peer_copies=1",
    "snapshot.bandwidth_bytes_per_second=6e6",
    "snapshot.iteration_seconds=0.1",
    "snapshot.policy.num_experts=1",
    "snapshot.policy.max_lost_share=null",
)
LAYOUTS = {
    "EP2": ("launch.num_nodes=2", "parallel.expert_model_parallel_size=2"),
    "PP2 EP2 DP2 sharded": (
        "launch.num_nodes=4",
        "parallel.pipeline_model_parallel_size=2",
        "parallel.expert_model_parallel_size=2",
        "parallel.use_distributed_optimizer=true",
    ),
}
EXTENDED = ("EP2",)
"""Layouts whose features another layout also has."""
LARGE = ("PP2 EP2 DP2 sharded",)
DENSE = ("model.num_moe_experts=null", "model.moe_ffn_hidden_size=null", "parallel.expert_model_parallel_size=1")
NUM_EXPERTS = 8
PLANNED_TOKENS = NUM_ITERATIONS * 4 * 16 * 2


def train(
    runs: Path, forkserver: str, *overrides: str, faults: Sequence[str] = (), snapshots: Sequence[str] = PARTIAL
) -> JobResult:
    quoted = ", ".join(f"'{fault}'" for fault in faults)
    return run_job([*JOB, *snapshots, f"testing.failpoints=[{quoted}]", *overrides], forkserver=forkserver, runs=runs)


def of_kind(job: JobResult, kind: str) -> list[dict[str, Any]]:
    return [event for event in job.records() if event["kind"] == kind]


def recount(job: JobResult) -> list[int]:
    """Compute from the recorded tokens and starts of windows what each recovery lost, for one expert of a layer in
    turn.

    Every window from one recovery to the next begins one iteration after the window before it. The first one captures
    all experts.
    """
    loads: dict[int, np.ndarray] = {}
    first, lost = of_kind(job, "snapshot_planned")[0]["iteration"], []
    for event in job.records():
        if event["kind"] == "expert_load":
            loads[event["iteration"]] = np.array(event["layers"])
        if event["kind"] == "recovery_started":
            at = event["iteration"]
            captured = np.full(loads[at].shape, first)
            for start in range(first + 1, at + 1):
                mask = Sequential().choose(start, 1, loads[at] * 0, 2)
                captured = np.where(mask, start, captured)
            since = np.array([loads[iteration] for iteration in range(1, at + 1)])
            ages = np.arange(1, at + 1)[:, None, None] > captured
            lost.append(int((since * ages).sum()))
            # After a recovery, the whole state is captured with the next iteration.
            first = at + 1
    return lost


@pytest.mark.parametrize("layout", chosen(LAYOUTS, EXTENDED))
def test_a_recovery_loses_what_the_router_had_assigned_to_the_experts_left_out(
    tmp_path: Path, warm_forkserver: str, layout: str
) -> None:
    faults = [
        'kill(at_iteration=9,phase="backward",generation=0)',
        'kill(at_iteration=13,phase="capture",generation=1)',
    ]
    bubbles = ["snapshot.copy_in_bubbles=true"] if "PP2" in layout else []
    job = train(tmp_path / "job", warm_forkserver, *LAYOUTS[layout], *bubbles, faults=faults)
    assert job.exit_code == 0, job.output
    calm = train(tmp_path / "calm", warm_forkserver, *LAYOUTS[layout], snapshots=["snapshot=none"])
    started, lost = of_kind(job, "recovery_started"), of_kind(job, "expert_updates_lost")
    assert [event["strategy"] for event in started] == ["rollback"] * 2
    assert [event["source"] for event in started] == ["memory"] * 2
    assert [event["iteration"] for event in lost] == [event["iteration"] for event in started]
    tokens = recount(job)
    assert [event["num_tokens"] for event in lost] == tokens and all(tokens)
    shares = np.cumsum(tokens) / (4 * PLANNED_TOKENS)
    assert [event["lost_share"] for event in lost] == pytest.approx(shares.tolist())
    # Up to the first loss nothing differs; afterwards it must, because updates are lost.
    before, after = states(calm), states(job)
    assert all(after[iteration][0] == before[iteration][0] for iteration in range(1, 9))
    assert after[NUM_ITERATIONS][-1] != before[NUM_ITERATIONS][-1]
    assert not of_kind(job, "snapshot_problem")
    copied = [event.get("idle_copied_bytes") for event in of_kind(job, "window_committed")]
    assert any(copied) if bubbles else copied.count(None) == len(copied)


def test_experts_make_up_for_lost_tokens_with_unused_capacity(tmp_path: Path, warm_forkserver: str) -> None:
    """What is still owed is part of the state that a second recovery restores."""
    keys = ("model.moe_expert_capacity_factor=1.0", "snapshot.repay_capacity_share=1.0")
    faults = [
        'kill(at_iteration=5,phase="backward",generation=0)',
        'kill(at_iteration=9,phase="backward",generation=1)',
    ]
    job = train(tmp_path, warm_forkserver, *LAYOUTS["EP2"], *keys, faults=faults)
    assert job.exit_code == 0, job.output
    lost = [event["lost_share"] for event in of_kind(job, "expert_updates_lost")]
    shares = [(event["lost_share"], event["owed_share"]) for event in of_kind(job, "window_committed")]
    assert len(lost) == 2 and 0.0 < lost[0] < lost[1]
    assert {share for share, _ in shares} == {0.0, *lost}
    for number, share in enumerate(lost):
        owed = [debt for total, debt in shares if total == share]
        assert owed == sorted(owed, reverse=True) and owed[-1] < owed[0], "experts owe fewer tokens with each window"
        before = [debt for total, debt in shares if total < share][-1] if number else 0.0
        assert owed[0] <= before + share - (lost[number - 1] if number else 0.0)
    most = 2 * 4 * 16  # experts of a token, samples and tokens of a sample
    assert all(sum(layer) <= most for event in of_kind(job, "expert_load") for layer in event["layers"])


def states(job: JobResult) -> dict[int, list[tuple[str, ...]]]:
    """Return the digests of all ranks after each iteration, the first generation's first."""
    found: dict[int, list[tuple[str, ...]]] = {}
    for event in of_kind(job, "state_digest"):
        found.setdefault(event["iteration"], []).append(tuple(event["digests"]))
    return found


@pytest.mark.extended
def test_a_window_in_memory_and_the_same_window_on_storage_give_the_same_bits(
    tmp_path: Path, warm_forkserver: str
) -> None:
    storage = ("snapshot.persist_interval_windows=1", "snapshot.keep_persisted=0")
    persisting = [*LAYOUTS["EP2"], *storage, "snapshot.policy.interval_iterations=4"]
    fault = 'kill(at_iteration=12,phase="update",generation=0)'
    job = train(tmp_path, warm_forkserver, *persisting, faults=[fault])
    assert job.exit_code == 0, job.output
    (started,) = of_kind(job, "recovery_started")
    at, from_memory = started["iteration"], states(job)
    with WindowFolder(job.run_dir / "windows").open(WindowKey(start_iteration=at, generation=0), 1) as opened:
        assert opened.earlier, "the file lacks pieces"
        assert opened.num_bytes < 0.8 * of_kind(job, "snapshot_planned")[0]["window_bytes"]
    for window in WindowFolder(job.run_dir / "windows").list_windows():
        if window.start_iteration > at or window.generation > 0:
            name = f"window_{window.start_iteration:07d}" + (f".{window.generation}" if window.generation else "")
            shutil.rmtree(job.run_dir / "windows" / name)
    shutil.rmtree(job.run_dir / "checkpoints")
    again = train(tmp_path, warm_forkserver, *persisting, "run.resume=auto")
    assert again.exit_code == 0, again.output
    chosen = of_kind(again, "recovery_started")[-1]
    assert (chosen["source"], chosen["iteration"]) == ("persisted", at), again.output
    first, second = of_kind(again, "expert_updates_lost")
    assert (first["num_stored_tokens"], second["num_stored_tokens"]) == (0, first["num_tokens"])
    same = {"time_unix_seconds": 0, "num_stored_tokens": 0}
    assert {**first, **same} == {**second, **same}
    from_storage = states(again)
    for iteration in range(at + 1, NUM_ITERATIONS + 1):
        assert from_storage[iteration][-1] == from_memory[iteration][-1]


def test_a_lost_node_comes_back_from_the_copies_that_its_peer_put_together(
    tmp_path: Path, warm_forkserver: str
) -> None:
    """The peer received only captured pieces, and copied the others itself. Its copy is the only one that is left."""
    words = [
        *JOB,
        *PARTIAL,
        *LAYOUTS["EP2"],
        "recovery.keep_layout=true",
        "recovery.keep_processes=false",
        "nodes.num_spare_nodes=1",
        "testing.failpoints=['stop(rank=1,at_iteration=11,phase=\"backward\",generation=0)']",
    ]
    job = run_killing_nodes(words, forkserver=warm_forkserver, runs=tmp_path)
    assert job.exit_code == 0, job.output
    (started,) = of_kind(job, "recovery_started")
    assert started["strategy"] == "rollback" and started["source"] == "memory" and started["iteration"] >= 7
    (lost,) = of_kind(job, "expert_updates_lost")
    assert [lost["num_tokens"]] == recount(job)
    committed = [event for event in of_kind(job, "window_committed") if event["start_iteration"] > 1]
    assert (
        min(event["replicated_bytes"] for event in committed) < 0.5 * of_kind(job, "snapshot_planned")[0]["dense_bytes"]
    )


@pytest.mark.parametrize("layout", chosen(LAYOUTS, LARGE))
def test_a_lost_node_comes_back_from_copies_that_its_peer_computed_from_gradients(
    tmp_path: Path, warm_forkserver: str, layout: str
) -> None:
    """Every window has all experts, so the job must end with the bits of an undisturbed job."""
    # A server can compute the first copy when it has imported torch, which takes as long as many of these iterations.
    longer = "training.train_iterations=70"
    words = [
        *JOB,
        longer,
        *PARTIAL,
        *LAYOUTS[layout],
        f"snapshot.policy.num_experts={NUM_EXPERTS}",
        "snapshot.policy.send_gradients=true",
        "recovery.keep_layout=true",
        "recovery.keep_processes=false",
        "nodes.num_spare_nodes=1",
        "testing.failpoints=['stop(rank=1,at_iteration=63,phase=\"backward\",generation=0)']",
    ]
    job = run_killing_nodes(words, forkserver=warm_forkserver, runs=tmp_path / "job")
    assert job.exit_code == 0, job.output
    (started,) = of_kind(job, "recovery_started")
    assert started["strategy"] == "rollback" and started["source"] == "memory" and started["iteration"] >= 10
    assert not of_kind(job, "snapshot_problem"), "all repeated updates have the bits of the sender"
    dense = of_kind(job, "snapshot_planned")[0]["dense_bytes"]
    committed = [event for event in of_kind(job, "window_committed") if event["start_iteration"] > 2]
    assert min(event["replicated_bytes"] for event in committed if event["replicated_bytes"]) < 0.7 * dense
    calm = train(tmp_path / "calm", warm_forkserver, *LAYOUTS[layout], longer, snapshots=["snapshot=none"])
    for iteration, digests in states(calm).items():
        assert set(states(job)[iteration]) == set(digests), iteration


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("recovery.keep_layout=true", "nodes.num_spare_nodes=1"),
            "must be a policy that captures all experts with recovery.keep_layout",
        ),
        (DENSE, "must be a policy that captures the whole state with model.num_moe_experts=null"),
        (
            ("snapshot.policy.leave_out=[weights]",),
            "must be a list of one or more of masters, moments, each at most once",
        ),
        (("snapshot.policy.num_persisted_experts=1",), "must be null with snapshot.persist_interval_windows=0"),
        (
            ("snapshot.policy.send_gradients=true", "snapshot.policy.interval_iterations=2"),
            "send_gradients=true: must be false with snapshot.policy.interval_iterations=2",
        ),
        (
            ("snapshot.policy.send_gradients=true", "snapshot.num_peer_copies=0"),
            "send_gradients=true: must be false with snapshot.num_peer_copies=0",
        ),
        (
            ("snapshot.policy.num_persisted_experts=2", "snapshot.persist_interval_windows=1"),
            "num_persisted_experts=2: must be null or at least 1 and at most snapshot.policy.num_experts=1",
        ),
    ],
)
def test_what_cannot_be_carried_out_is_refused_before_anything_starts(
    tmp_path: Path, warm_forkserver: str, overrides: tuple[str, ...], message: str
) -> None:
    job = train(tmp_path, warm_forkserver, *LAYOUTS["EP2"], *overrides)
    assert job.exit_code == 2 and message in job.output, job.output
    assert not (tmp_path / "job").exists()


TWO_LEVELS = (
    *PARTIAL,
    "snapshot.policy.num_experts=2",
    "snapshot.policy.num_persisted_experts=1",
    "snapshot.persist_interval_windows=1",
    "snapshot.keep_persisted=0",
)


def captured_at(job: JobResult, key: WindowKey, rank: int) -> dict[str, int]:
    """Return the iteration of the state of every expert of a rank in a file, by layer and number."""
    with WindowFolder(job.run_dir / "windows").open(key, rank) as opened:
        (part,) = opened.verify().slices
    return {
        match[0]: part.iteration_of(index)
        for index, piece in enumerate(part.pieces)
        if (match := re.search(r"layers\.\d+\.mlp\.experts\.local_experts\.\d+", piece.parameter))
        and piece.component == "exp_avg"
    }


CHOSEN = tuple(
    "snapshot.storage_bandwidth_bytes_per_second=1.0" if "num_persisted" in word else word for word in TWO_LEVELS
)
"""Windows of ``TWO_LEVELS``. Storage is so slow that files have one expert of each layer."""


@pytest.mark.parametrize(
    "levels", [pytest.param(TWO_LEVELS, marks=pytest.mark.extended), CHOSEN], ids=["given", "chosen"]
)
def test_memory_serves_if_servers_survive_and_files_if_not(
    tmp_path: Path, warm_forkserver: str, levels: tuple[str, ...]
) -> None:
    """All ranks are killed at the same iteration. The servers survive the first time and not the second time."""
    fault = 'kill(at_iteration=12,phase="update",generation=0)'
    job = train(tmp_path, warm_forkserver, *LAYOUTS["EP2"], faults=[fault], snapshots=levels)
    assert job.exit_code == 0, job.output
    (started,), (lost,) = of_kind(job, "recovery_started"), of_kind(job, "expert_updates_lost")
    assert started["source"] == "memory" and (lost["num_stored_tokens"], lost["num_memory_experts"]) == (0, 0)
    at, first = started["iteration"], of_kind(job, "snapshot_planned")[0]["iteration"]
    loads = {event["iteration"]: np.array(event["layers"]) for event in of_kind(job, "expert_load")}
    in_memory = np.full(loads[at].shape, first)
    for start in range(first + 1, at + 1):
        in_memory = np.where(Sequential().choose(start, 2, loads[at] * 0, 2), start, in_memory)
    assert lost["num_tokens"] == tokens_since(loads, in_memory, at)
    # Now only files are left: those of the newest iteration at which every rank had written one.
    folder = WindowFolder(job.run_dir / "windows")
    stored = [window for window in folder.list_windows() if window.generation == 0 and window.start_iteration <= at][-1]
    for window in folder.list_windows():
        if window > stored:
            name = f"window_{window.start_iteration:07d}" + (f".{window.generation}" if window.generation else "")
            shutil.rmtree(job.run_dir / "windows" / name)
    in_files = np.zeros_like(in_memory)
    for rank in range(2):
        for name, iteration in captured_at(job, stored, rank).items():
            layer, number = map(int, re.findall(r"\d+", name))
            in_files[layer, number] = iteration
    assert (in_files > 0).all() and (in_files < in_memory).any()
    shutil.rmtree(job.run_dir / "checkpoints")
    again = train(tmp_path, warm_forkserver, *LAYOUTS["EP2"], "run.resume=auto", snapshots=levels)
    assert again.exit_code == 0, again.output
    chosen = of_kind(again, "recovery_started")[-1]
    assert (chosen["source"], chosen["iteration"]) == ("persisted", stored.start_iteration), again.output
    _, second = of_kind(again, "expert_updates_lost")
    assert second["num_tokens"] == second["num_stored_tokens"] == tokens_since(loads, in_files, stored.start_iteration)
    assert second["num_tokens"] > lost["num_tokens"]


def tokens_since(loads: dict[int, np.ndarray], captured: np.ndarray, at: int) -> int:
    """Return the tokens that experts have processed since the iterations ``captured``, up to iteration ``at``."""
    since = np.array([loads[iteration] for iteration in range(1, at + 1)])
    return int((since * (np.arange(1, at + 1)[:, None, None] > captured)).sum())


@pytest.mark.extended
def test_experts_of_the_node_that_is_left_come_from_its_memory(tmp_path: Path, warm_forkserver: str) -> None:
    """Windows have no copies on peers, so all ranks continue from files after the loss of a node."""
    words = [
        *JOB,
        *TWO_LEVELS,
        *LAYOUTS["EP2"],
        "snapshot.num_peer_copies=0",
        "snapshot.policy.interval_iterations=4",
        "recovery.keep_layout=true",
        "recovery.keep_processes=false",
        "nodes.num_spare_nodes=1",
        "testing.failpoints=['stop(rank=1,at_iteration=13,phase=\"backward\",generation=0)']",
    ]
    job = run_killing_nodes(words, forkserver=warm_forkserver, runs=tmp_path)
    assert job.exit_code == 0, job.output
    (started,), (lost,) = of_kind(job, "recovery_started"), of_kind(job, "expert_updates_lost")
    assert started["source"] == "persisted", job.output
    at, first = started["iteration"], of_kind(job, "snapshot_planned")[0]["iteration"]
    loads = {event["iteration"]: np.array(event["layers"]) for event in of_kind(job, "expert_load")}
    # Windows begin every fourth iteration. The newest one that was committed before the loss is in memory.
    before = itertools.takewhile(lambda event: event["kind"] != "recovery_started", job.records())
    committed = [event["start_iteration"] for event in before if event["kind"] == "window_committed"]
    experts = np.full(loads[at].shape, first)
    windows = {}
    for start in range(first, committed[-1] + 1, 4):
        if start > first:
            experts = np.where(Sequential().choose(start // 4, 2, experts * 0, 2), start, experts)
        windows[start] = experts
    state = np.zeros_like(experts)
    for rank in range(2):
        for name, iteration in captured_at(job, WindowKey(start_iteration=at, generation=0), rank).items():
            layer, number = map(int, re.findall(r"\d+", name))
            state[layer, number] = iteration
    in_memory = windows[committed[-1]]
    is_taken = (in_memory > state) & (in_memory <= at) & (np.arange(state.shape[1]) < state.shape[1] // 2)
    assert lost["num_memory_experts"] == is_taken.sum() > 0
    assert lost["num_stored_tokens"] == tokens_since(loads, np.where(is_taken, at, state), at)
    assert lost["num_tokens"] == tokens_since(loads, np.where(is_taken, in_memory, state), at)
