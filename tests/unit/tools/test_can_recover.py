"""Tests the predictions of can_recover for made-up runs and configurations."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_ft.config.membership import config_of, derive_placement
from megatron_ft.config.serialize import from_dict, to_dict
from megatron_ft.config.validate import on_device
from megatron_ft.control.rpc import RpcServer, new_token
from megatron_ft.control.rundir import RunId
from megatron_ft.errors import ConfigError, DataError, RecoveryError
from megatron_ft.events import (
    MembershipChanged,
    PlacementInForce,
    RanksReady,
    RanksRestarted,
    Record,
    RunStarted,
    WindowCommitted,
)
from megatron_ft.operators import OperatorId
from megatron_ft.planning.devices import DeviceFacts
from megatron_ft.planning.placement.stage import StageRequest, first_plans
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.snapshot.storage.window_file import write_window
from megatron_ft.testing.stored_samples import sample_window
from tests.unit.snapshot.storage.conftest import make_checkpoint
from tools import can_recover
from tools.can_recover import grouped, read_config

ELASTIC = [
    "model=moe_micro",
    "placement=spread",
    "placement.num_slots_per_rank=6",
    "launch.num_nodes=4",
    "launch.ranks_per_node=1",
    "parallel.use_distributed_optimizer=false",
]
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run the command with ``--json``. Return the document, with the exit code as ``code``."""

    def run(*words: str) -> dict[str, Any]:
        code = can_recover.main([*words, "--json"])
        out, err = capsys.readouterr()
        return {**(json.loads(out) if out else {}), "code": code, "error": err}

    return run


class MadeUpRun:
    """Folder of a run of four nodes that has lost node 2."""

    def __init__(self, path: Path) -> None:
        from pretrain_moe import compose

        path.mkdir()
        self.path = path
        given, _ = compose([*ELASTIC, "recovery.min_nodes=2"])
        (path / "config.yaml").write_text(yaml.safe_dump(to_dict(given)))
        self.config = read_config(path / "config.yaml")
        self.say(RanksReady(seconds=1.0, world_size=4))
        self.metrics(1, 7)
        self.change((0, 1, 3), 4)

    def say(self, *records: Record) -> None:
        with (self.path / "events.jsonl").open("a") as file:
            file.writelines(json.dumps(record.to_record()) + "\n" for record in records)

    def metrics(self, first: int, last: int) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            for iteration in range(first, last + 1):
                record = {"kind": "metrics", "iteration": iteration, "iteration_seconds": 0.5, "loss": 1.0}
                file.write(json.dumps(record) + "\n")

    def change(self, nodes: tuple[int, ...], iteration: int) -> None:
        """Add a membership of ``nodes`` and its placement."""
        remaining = config_of(self.config, nodes)
        from megatron_ft.config.membership import JobInputs

        plans = first_plans(remaining, StageRequest.of_job(remaining), JobInputs())
        folder = self.path / "placements"
        folder.mkdir(exist_ok=True)
        content = {"stages": [plan.to_json() for plan in plans], "loads": None}
        (folder / f"iter_{iteration:07d}.json").write_text(json.dumps(content))
        about = {"reason": "lost", "generation": 1, "seconds": 1.5}
        self.say(
            MembershipChanged(iteration=iteration - 1, nodes=nodes, world_size=len(nodes), **about),  # type: ignore[arg-type]
            PlacementInForce(iteration=iteration, reason="membership", stages=("x",)),
        )


@pytest.fixture
def run(tmp_path: Path) -> MadeUpRun:
    return MadeUpRun(tmp_path / "run")


@pytest.fixture
def living(run: MadeUpRun) -> Iterator[MadeUpRun]:
    """Return the same run while its controller answers. It has nodes 0, 1 and 3."""
    token = new_token()
    server = RpcServer("Controller", {"status": lambda _: {"members": [0, 1, 3]}}, interface="127.0.0.1", token=token)
    server.start()
    file = run.path / "controller.json"
    file.touch(0o600)
    file.write_text(json.dumps({"address": server.address, "token": token, "epoch": 1}))
    yield run
    server.stop()


def test_a_living_run_goes_on_with_replicas_in_the_time_it_took_before(living: MadeUpRun, ask: Ask) -> None:
    found = ask(str(living.path), "--lose", "3")
    assert (found["code"], found["strategy"], found["max_iterations"]) == (0, "living_state", 0)
    assert (found["seconds_again"], found["seconds_to_continue"]) == (0.0, 1.5)
    assert found["moved_bytes"] is not None and not found["lost_operators"]


def test_an_answer_names_its_device_and_what_the_other_one_refuses(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", *ELASTIC, "recovery.min_nodes=3", "--lose", "1"]
    monkeypatch.setattr("pretrain_moe.observe_here", lambda: DeviceFacts(has_driver=False, driver="", num_gpus=0))
    found = ask(*words)
    assert (found["strategy"], found["device"]) == ("living_state", "cpu")
    assert "on cuda this job would be refused before it starts" in found["notes"][0]
    assert can_recover.main(words) == 0
    assert capsys.readouterr().out.startswith("on cpu: loss of node 1: living_state")
    monkeypatch.setattr("pretrain_moe.observe_here", lambda: DeviceFacts(has_driver=True, driver="", num_gpus=8))
    found = ask(*words)
    assert found["code"] == ConfigError.exit_code and "must be cpu with recovery.min_nodes=3" in found["error"]


def test_a_run_on_gpus_is_not_promised_what_only_cpus_do(living: MadeUpRun, ask: Ask) -> None:
    living.say(
        RunStarted(run_name="run", model="moe_micro", world_size=4, num_nodes=4, train_iterations=9, device="cpu")
    )
    assert (ask(str(living.path), "--lose", "3")["strategy"], ask(str(living.path), "--lose", "3")["notes"]) == (
        "living_state",
        [],
    )
    living.say(
        RunStarted(run_name="run", model="moe_micro", world_size=4, num_nodes=4, train_iterations=9, device="cuda: H")
    )
    found = ask(str(living.path), "--lose", "3")
    assert (found["strategy"], found["device"]) == ("start_over", "cuda")
    assert found["declined"][0]["reason"] == "training.device=cuda"


def test_nodes_lost_before_cannot_be_lost_again(living: MadeUpRun, ask: Ask) -> None:
    found = ask(str(living.path), "--lose", "2")
    assert found["code"] == ConfigError.exit_code and "must be one of the present nodes [0, 1, 3]" in found["error"]


def test_too_many_lost_go_back_to_the_newest_checkpoint_that_verifies(living: MadeUpRun, ask: Ask) -> None:
    for iteration in (3, 5):
        make_checkpoint(living.path / "checkpoints" / f"iter_{iteration:07d}", iteration)
    found = ask(str(living.path), "--lose", "0,3")
    assert (found["code"], found["strategy"], found["max_iterations"], found["is_automatic"]) == (
        0,
        "checkpoint",
        2,
        False,
    )
    assert found["seconds_again"] == pytest.approx(1.0) and found["seconds_to_continue"] is None
    victim = living.path / "checkpoints" / "iter_0000005" / "__0_0.distcp"
    victim.write_bytes(bytes(5000))
    found = ask(str(living.path), "--lose", "0,3")
    assert found["max_iterations"] == 4 and "iter_0000005: skipped" in found["notes"][0]


def test_checkpoints_and_windows_of_another_run_are_not_promised(living: MadeUpRun, ask: Ask) -> None:
    """A job of this run would not continue from them."""
    own, other = RunId.make(living.path, is_older=False).run_id, "6" * 32
    for iteration, run_id in ((3, own), (5, other)):
        directory = living.path / "checkpoints" / f"iter_{iteration:07d}"
        manifest = make_checkpoint(directory, iteration)
        replace(manifest, run_id=run_id).write(directory)
    for rank in range(4):
        window, payload = sample_window(6, rank)
        window = replace(window, run_id=other, world_size=4)
        write_window(living.path / "windows", window, [memoryview(part) for part in payload])
    found = ask(str(living.path), "--lose", "0,3")
    assert (found["strategy"], found["max_iterations"]) == ("checkpoint", 4)
    skipped = [note for note in found["notes"] if ": skipped: " in note]
    assert len(skipped) == 2 and all("belongs to another run" in note for note in skipped)


def test_the_records_of_a_run_state_where_its_newest_windows_end(living: MadeUpRun) -> None:
    own = RunId.make(living.path, is_older=False).run_id
    for rank in range(4):
        window, payload = sample_window(4, rank)
        window = replace(window, run_id=own, world_size=4)
        write_window(living.path / "windows", window, [memoryview(part) for part in payload])
    living.say(WindowCommitted(iteration=7, start_iteration=6, num_iterations=1, stalled_seconds=0.0))
    stored, notes = can_recover.Run.of(living.path, as_if_running=True).stored()
    assert not notes and (stored.memory_start, stored.memory_last) == (6, 6)
    assert (stored.persisted_start, stored.persisted_last) == (4, 4 + window.num_slices - 1) and window.num_slices > 1


def test_a_run_without_anything_cannot_recover(living: MadeUpRun, ask: Ask) -> None:
    found = ask(str(living.path), "--lose", "0,1")
    assert (found["code"], found["strategy"]) == (RecoveryError.exit_code, "start_over")
    assert found["max_iterations"] == 7


def test_a_run_that_has_ended_says_so_and_can_be_asked_what_if(run: MadeUpRun, ask: Ask) -> None:
    found = ask(str(run.path), "--lose", "3")
    assert found["code"] == RecoveryError.exit_code and "is not running" in found["declined"][0]["reason"]
    assert ask(str(run.path), "--lose", "3", "--as-if-running")["strategy"] == "living_state"


def test_ranks_that_were_started_again_are_on_all_nodes(run: MadeUpRun, ask: Ask) -> None:
    run.say(RanksReady(seconds=1.0, world_size=4))
    run.change((0, 1, 2, 3), 8)
    assert ask(str(run.path), "--lose", "2", "--as-if-running")["strategy"] == "living_state"


def test_nodes_and_windows_in_memory_outlive_a_restart_of_the_ranks(run: MadeUpRun) -> None:
    ready = RanksReady(seconds=1.0, world_size=4)
    restarted = RanksRestarted(
        generation=1, reason="killed", failed_ranks=(1,), iteration=9, num_restarts_left=2, nodes=(0, 4, 2, 3)
    )
    window = WindowCommitted(
        iteration=8,
        start_iteration=4,
        num_iterations=3,
        stalled_seconds=0.0,
        captured_bytes=1,
        replicated_bytes=1,
        persisted_bytes=0,
    )
    changed = MembershipChanged(
        iteration=3, nodes=(0, 1), world_size=2, generation=1, reason="lost by an earlier job", seconds=1.0
    )
    events = [ready, changed, ready, window, restarted, ready]
    assert list(can_recover.since_start(events)) == [ready, window, restarted, ready]
    assert can_recover.layout_of(run.config, events).nodes == (0, 2, 3, 4)
    assert can_recover.layout_of(run.config, [*events, ready]).nodes == (0, 1, 2, 3), "another job has started"


def test_events_show_which_windows_and_places_are_still_in_use() -> None:
    def placed(iteration: int, reason: str) -> Record:
        return PlacementInForce(iteration=iteration, reason=reason, stages=("x",))

    def window(start: int) -> WindowCommitted:
        sizes = {"captured_bytes": 1, "replicated_bytes": 1, "persisted_bytes": 0}
        return WindowCommitted(
            iteration=start + 4, start_iteration=start, num_iterations=3, stalled_seconds=0.0, **sizes
        )

    def changed(*nodes: int) -> Record:
        about = {"reason": "lost", "generation": 1, "seconds": 1.0, "iteration": 3}
        return MembershipChanged(nodes=nodes, world_size=len(nodes), **about)  # type: ignore[arg-type]

    ready = RanksReady(seconds=1.0, world_size=4)
    events = [ready, placed(1, "first"), window(4), changed(0, 4, 2, 3)]
    assert can_recover.windows_in_memory(events) == [window(4)], "a spare has taken a place"
    assert can_recover.placed_from(events) == 0
    assert can_recover.nodes_since_restart(events) == [(0, 4, 2, 3)]
    events += [placed(9, "imbalance 1.5 -> 1.0"), changed(0, 2, 3), placed(10, "membership"), changed(0, 2, 3, 4)]
    assert can_recover.windows_in_memory(events) == [], "another number of ranks has captured this window"
    assert can_recover.placed_from(events) == 9
    assert can_recover.nodes_since_restart(events)[1] == (0, 2, 3), "since then, lost places stay empty"
    events += [
        window(12),
        RanksRestarted(
            generation=3, reason="killed", failed_ranks=(), iteration=15, num_restarts_left=1, nodes=(0, 2, 3, 4)
        ),
        ready,
    ]
    assert can_recover.windows_in_memory(events) == [window(12)]
    assert can_recover.placed_from(events) == 0
    assert can_recover.nodes_since_restart(events) == [(0, 2, 3, 4)]


def test_the_controller_of_a_job_states_which_nodes_can_take_lost_places(tmp_path: Path) -> None:
    from pretrain_moe import compose

    keys = ["nodes.num_spare_nodes=1", "recovery.keep_layout=true", "recovery.min_nodes=2"]
    config = on_device(derive_placement(compose([*ELASTIC, *keys])[0]), "cpu")

    def facts(status: dict[str, Any], *events: Record) -> RecoveryFacts:
        layout = can_recover.layout_of(config, events)
        known = {"events": events, "layout": layout, "is_running": True, "status": status}
        return can_recover.Run(path=tmp_path, config=config, **known).facts([], None)

    (tmp_path / "metrics.jsonl").touch()
    lost = RanksReady(seconds=1.0, world_size=4)
    found = facts({"members": [0, 1, 2, 3], "keeps_layout": True, "replacements": [4], "worn": [2]}, lost)
    assert (found.has_places, found.num_spare_nodes, found.worn_nodes) == (True, 1, (2,))
    found = facts({"members": [0, 1, 2, 3], "keeps_layout": False, "replacements": [], "worn": []}, lost)
    assert (found.has_places, found.num_spare_nodes) == (False, 0), "it has grown to all its nodes again"
    assert facts({}, lost).num_spare_nodes == 1, "an earlier version of the controller"


def test_a_placement_of_another_membership_is_refused(run: MadeUpRun, ask: Ask) -> None:
    run.say(RanksReady(seconds=1.0, world_size=4))
    found = ask(str(run.path), "--lose", "2")
    assert found["code"] == DataError.exit_code and "a placement of 3 ranks" in found["error"]


@pytest.mark.parametrize("name", ["config.yaml", "events.jsonl", "placements/iter_0000004.json"])
def test_a_damaged_folder_is_named(run: MadeUpRun, ask: Ask, name: str) -> None:
    (run.path / name).write_text("{]}\n")
    found = ask(str(run.path), "--lose", "1")
    assert found["code"] == DataError.exit_code and Path(name).name in found["error"]


def test_a_configuration_is_judged_before_it_runs(ask: Ask) -> None:
    found = ask("--config", *ELASTIC, "recovery.min_nodes=2", "--lose", "1")
    assert (found["code"], found["strategy"], found["seconds_to_continue"]) == (0, "living_state", None)
    found = ask("--config", *ELASTIC, "checkpoint.save_interval_iterations=7", "--lose", "1")
    assert (found["strategy"], found["max_iterations"], found["seconds_again"]) == ("checkpoint", 7, None)
    windows = ["snapshot=sparse_window", "launch.num_nodes=3", "recovery.max_restarts=1", "model=moe_micro"]
    found = ask("--config", *windows, "--lose", "0", "--ranks-only")
    assert (found["code"], found["strategy"], found["medium"]) == (0, "rollback", "memory")
    assert found["max_iterations"] is None
    found = ask("--config", *windows, "--all-processes")
    assert (found["code"], found["strategy"]) == (RecoveryError.exit_code, "start_over")
    found = ask("--config", *windows, "snapshot.outlive_job_seconds=60", "--all-processes")
    assert (found["code"], found["strategy"], found["medium"]) == (0, "rollback", "memory")


def test_text_says_what_is_unknown_and_never_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert can_recover.main(["--config", *ELASTIC, "--lose", "1"]) == RecoveryError.exit_code
    out = capsys.readouterr().out
    assert "time to repeat iterations: unknown" in out and "time until training continues: unknown" in out
    assert "not used: living_state: " in out


def test_operators_are_reported_in_ranges() -> None:
    experts = [OperatorId(layer=2, kind="expert", expert=number) for number in (0, 1, 2, 5)]
    dense = OperatorId(layer=2, kind="gate")
    assert grouped([dense, *experts]) == "2.gate, 2.expert.0-2, 2.expert.5"
    assert grouped([]) == ""


@pytest.mark.parametrize("words", [["--lose", "1"], ["run", "--config", "x=1", "--lose", "1"], ["run", "--lose", "a"]])
def test_a_question_that_is_none_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        can_recover.main(words)
    assert caught.value.code == 2


def test_the_configuration_file_gives_the_job_back(run: MadeUpRun) -> None:
    assert from_dict(to_dict(run.config)) == run.config


def test_state_on_living_nodes_is_no_promise_where_the_job_ends(capsys: pytest.CaptureFixture[str]) -> None:
    for overrides, words in (
        (["recovery.min_nodes=3"], "keep their current state"),
        ([], "have their current state on remaining nodes, but the recovery does not use this state"),
    ):
        can_recover.main(["--config", *ELASTIC, "training.device=cpu", *overrides, "--lose", "1"])
        assert words in capsys.readouterr().out


@pytest.mark.parametrize(("num_valid", "expected"), [(2, (0, 2)), (1, (0, 1))])
def test_the_layout_follows_from_memberships_that_all_ranks_have_formed(
    num_valid: int, expected: tuple[int, ...]
) -> None:
    """Node 2 is lost; later it joins, and node 3 is lost before the next iteration. The schedule of the last membership
    states whether its ranks continue from the state with which node 2 joined."""
    from pretrain_moe import compose

    words = ["launch.num_nodes=4", "launch.ranks_per_node=1", "parallel.pipeline_model_parallel_size=2"]
    config, _ = compose([*words, "placement=overlap_search", "placement.num_slots_per_rank=8"])
    about = {"reason": "lost", "generation": 1, "seconds": 1.5, "world_size": 4}
    events = [
        RanksReady(seconds=1.0, world_size=4),
        *(
            MembershipChanged(iteration=iteration, nodes=nodes, schedule=("entry",) * size, **about)  # type: ignore[arg-type]
            for iteration, nodes, size in ((4, (0, 1, 3), 1), (6, (0, 1, 2, 3), 1), (6, (0, 1, 2), num_valid))
        ),
    ]
    assert can_recover.layout_of(config, events).processes == expected
