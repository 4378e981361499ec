"""Tests the entry point: help, version, dry runs, rank environments; it must not import large packages or leave folders
behind."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import yaml

import pretrain_moe
from megatron_ft.config.identity import settings_of
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import derive_placement
from megatron_ft.config.serialize import to_dict
from megatron_ft.control.rundir import RunId
from megatron_ft.corpus.indexed import IndexedWriter
from megatron_ft.corpus.samples import SplitPlan, resolve_vocab_size
from megatron_ft.corpus.tokenizers import build_tokenizer
from megatron_ft.errors import EXIT_CODES, CheckpointError, ConfigError
from megatron_ft.planning.devices import DeviceFacts
from megatron_ft.snapshot.storage.checkpoints import directory_name
from megatron_ft.snapshot.storage.manifest import Manifest
from tests.helpers.programs import write_program

ROOT = Path(__file__).parents[2]
LARGE = ("gpt_s", "gpt_m", "gpt_l", "gpt_350m_16e", "mixtral_8x7b", "deepseek_moe_16b", "qwen_moe")
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for key in ("SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(key, raising=False)


def test_help_names_groups_keys_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_moe.main(["--help"]) == 0
    text = capsys.readouterr().out
    for part in (
        "mixtral_8x7b",
        "training.train_iterations (int, 60)",
        "Number of iterations of the whole run.",
        "exit codes:",
    ):
        assert part in text
    assert all(f"\n  {code:>3}  " in text for code in EXIT_CODES)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_moe.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("megatron-ft ")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["dry_run=true"]])
def test_quick_answers_import_nothing_heavy_and_leave_nothing(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", str(ROOT / "pretrain_moe.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert not imported & {"torch", "megatron", "wandb", "transformer_engine"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", LARGE)
def test_large_models_pass_a_dry_run(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_moe.main(["dry_run=true", "dry_run_format=json", f"model={model}", "launch=srun"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_parameters"] == pytest.approx(plan["published_parameters"], rel=0.025)


@pytest.mark.parametrize(
    ("override", "formats"),
    [
        ("precision=bf16", "bf16"),
        ("precision.fp8=hybrid", "fp32; linear layers in fp8 (hybrid, tensorwise)"),
        (
            "precision=fp8_fp16_fp8_fp16",
            "bf16; linear layers in fp8 (hybrid, blockwise); master weights in fp16, moments in fp8 and fp16",
        ),
    ],
)
def test_a_dry_run_names_all_number_formats(override: str, formats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_moe.main(["dry_run=true", override]) == 0
    assert f"\n  formats       {formats}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf").glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}={path.stem}"
)
def test_every_file_of_conf_composes(path: Path) -> None:
    config, _ = pretrain_moe.compose([f"{path.parent.name}={path.stem}"])
    assert isinstance(config, JobConfig)


def test_experiments_pass_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted((ROOT / "conf" / "experiment").glob("*.yaml")):
        assert pretrain_moe.main([f"experiment={path.stem}", "dry_run=true"]) == 0, capsys.readouterr().err


def test_defaults_of_conf_are_those_of_the_dataclasses() -> None:
    config, text = pretrain_moe.compose([])
    assert config == JobConfig()
    assert yaml.safe_load(text)["training"]["train_iterations"] == 60


def test_a_local_job_is_launched_with_its_configuration() -> None:
    with (
        mock.patch("megatron_ft.control.launcher.launch", return_value=6) as launch,
        mock.patch("megatron_ft.corpus.samples.check_data", return_value=_data()),
    ):
        assert pretrain_moe.main(["training.train_iterations=20", "launch.ranks_per_node=2"]) == 6
    config, text = launch.call_args.args
    assert config.training.train_iterations == 20
    assert yaml.safe_load(text) == to_dict(config)


def test_torchrun_is_detected_and_its_counts_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    config, _ = pretrain_moe.compose([])
    environment = pretrain_moe._environment(config, [])
    assert environment is not None and environment.rank == 3
    adopted = pretrain_moe._adopt(config, environment, [])
    assert (adopted.launch.mode, adopted.launch.num_nodes, adopted.launch.ranks_per_node) == ("torchrun", 2, 2)


def test_a_chosen_local_mode_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    config, _ = pretrain_moe.compose(["launch=local"])
    assert pretrain_moe._environment(config, ["launch=local"]) is None


def test_only_the_first_rank_of_a_node_tells_a_configuration_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with mock.patch("threading.Event.wait", side_effect=SystemExit) as wait, pytest.raises(SystemExit):
        pretrain_moe.main(["model.num_layers=0"])
    assert wait.called and capsys.readouterr().err == "", "it is ended before it has a word"
    with mock.patch("threading.Event.wait"):
        assert pretrain_moe.main(["model.num_layers=0"]) == 2
    assert "model.num_layers=0" in capsys.readouterr().err, "it is not ended: no other process was refused"
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "2")
    assert pretrain_moe.main(["model.num_layers=0"]) == 2
    assert "model.num_layers=0" in capsys.readouterr().err


def test_more_memory_than_the_machine_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        mock.patch("megatron_ft.control.launcher.launch") as launch,
        mock.patch("megatron_ft.corpus.samples.check_data", return_value=_data()),
    ):
        assert pretrain_moe.main(["model=mixtral_8x7b", "training.device=cpu", "launch.ranks_per_node=8"]) == 2
    assert not launch.called
    assert "limits.host_memory_bytes=null" in capsys.readouterr().err


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="auto finds a GPU here")
def test_what_needs_a_gpu_is_refused_where_auto_finds_none(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["launch.ranks_per_node=2", "parallel.tensor_model_parallel_size=2"]
    with (
        mock.patch("megatron_ft.control.launcher.launch") as launch,
        mock.patch("megatron_ft.corpus.samples.check_data", return_value=_data()),
    ):
        assert pretrain_moe.main([*overrides, "parallel.expert_tensor_parallel_size=2"]) == 2
        assert pretrain_moe.main(["model.add_bias_linear=true"]) == 2
    assert not launch.called
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("=")[0] for line in lines] == [
        "error: parallel.expert_tensor_parallel_size",
        "error: model.add_bias_linear",
    ]
    assert all("found no GPU on this machine" in line for line in lines)


ELASTIC = ("placement=spread", "parallel.use_distributed_optimizer=false", "launch.num_nodes=4", "recovery.min_nodes=3")
GPUS = DeviceFacts(has_driver=True, driver="580", num_gpus=8, gpu_memory_bytes=80 << 30)
NO_GPU = DeviceFacts(has_driver=False, driver="", num_gpus=0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[DeviceFacts], mock.Mock]]:
    """Replace this machine by one with other devices. Return the arguments with which ``launch`` would have been
    called."""
    with (
        mock.patch("megatron_ft.control.launcher.launch", return_value=0) as launch,
        mock.patch("megatron_ft.corpus.samples.check_data", return_value=_data()),
    ):

        def choose(facts: DeviceFacts) -> mock.Mock:
            monkeypatch.setattr(pretrain_moe, "observe_here", lambda **_: facts)
            return launch

        yield choose


def test_ranks_get_the_device_that_was_checked(machine: Callable[[DeviceFacts], mock.Mock]) -> None:
    for facts, overrides, device in (
        (NO_GPU, ELASTIC, "cpu"),
        (GPUS, (), "cuda"),
        (GPUS, ("training.device=cpu",), "cpu"),
    ):
        launch = machine(facts)
        assert pretrain_moe.main(list(overrides)) == 0
        config, text = launch.call_args.args[:2]
        assert (config.training.device, yaml.safe_load(text)["training"]["device"]) == (device, device)


def test_a_recovery_that_gpus_refuse_ends_before_anything_starts(
    machine: Callable[[DeviceFacts], mock.Mock], capsys: pytest.CaptureFixture[str]
) -> None:
    launch = machine(GPUS)
    for overrides in (ELASTIC, (*ELASTIC, "dry_run=true")):
        assert pretrain_moe.main(list(overrides)) == 2
        assert "must be cpu with recovery.min_nodes=3" in capsys.readouterr().err
    assert not launch.called


def test_a_dry_run_names_the_device_that_refuses_a_recovery(
    machine: Callable[[DeviceFacts], mock.Mock], capsys: pytest.CaptureFixture[str]
) -> None:
    machine(NO_GPU)
    assert pretrain_moe.main([*ELASTIC, "dry_run=true"]) == 0
    text = capsys.readouterr().out
    assert "cost of a loss on cpu\n" in text
    assert "note: on cuda this job would be refused before it starts: training.device=cuda: must be cpu" in text
    assert pretrain_moe.main([*ELASTIC, "dry_run=true", "limits.gpu_memory_bytes=80000000000"]) == 2
    assert "must be cpu with recovery.min_nodes=3" in capsys.readouterr().err
    assert pretrain_moe.main(["launch.num_nodes=4", "dry_run=true"]) == 0
    assert "on cuda this job would also be accepted" in capsys.readouterr().out


def test_memory_of_gpus_is_compared_or_said_to_be_unchecked(
    machine: Callable[[DeviceFacts], mock.Mock], capsys: pytest.CaptureFixture[str]
) -> None:
    large = ["model=mixtral_8x7b", "training.device=cuda", "limits.host_memory_bytes=99000000000000"]
    launch = machine(GPUS)
    assert pretrain_moe.main(large) == 2
    refusal = capsys.readouterr().err
    assert f"limits.gpu_memory_bytes={80 << 30}: must be at least" in refusal and "by nvidia-smi" in refusal
    assert not launch.called
    machine(NO_GPU)
    assert pretrain_moe.main([*large, "dry_run=true"]) == 0
    text = capsys.readouterr().out
    assert ", not checked (limits.gpu_memory_bytes=null)" in text
    assert "note: GPU memory is not checked, because limits.gpu_memory_bytes=null; the largest rank needs" in text


def test_a_device_that_is_not_there_is_refused_before_data_are_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrain_moe, "observe_here", lambda **_: NO_GPU)
    assert pretrain_moe.main(["training.device=cuda", "data.train=[/no/such/data]"]) == ConfigError.exit_code
    assert "training.device=cuda: needs a GPU" in capsys.readouterr().err


def test_ranks_without_a_gpu_are_refused_before_they_start(
    machine: Callable[[DeviceFacts], mock.Mock], capsys: pytest.CaptureFixture[str]
) -> None:
    launch = machine(NO_GPU)
    assert pretrain_moe.main(["training.device=cuda"]) == 2
    assert "training.device=cuda: needs a GPU" in capsys.readouterr().err
    machine(dataclasses.replace(GPUS, visible="0,1"))
    assert pretrain_moe.main(["launch.ranks_per_node=4", "training.global_batch_size=8"]) == 2
    assert "launch.ranks_per_node=4: must be lower: the job starts 4 ranks" in capsys.readouterr().err
    assert pretrain_moe.main(["launch.num_nodes=4", "training.global_batch_size=8"]) == 2
    assert "launch.ranks_per_node=1: must be lower: the job starts 4 ranks on this machine" in capsys.readouterr().err
    assert not launch.called
    assert pretrain_moe.main(["launch.ranks_per_node=2", "training.global_batch_size=8"]) == 0
    assert pretrain_moe.main(["launch.num_nodes=4", "training.global_batch_size=8", "launch.ranks_per_gpu=2"]) == 0


@pytest.fixture
def saved_run(tmp_path: Path) -> list[str]:
    """Create a run with a checkpoint that has only a manifest. Return the overrides that continue the run."""
    with IndexedWriter(tmp_path / "text", np.dtype("<u2")) as writer:
        writer.add_document(np.arange(200_000) % 250)
    overrides = [f"data.train=[{tmp_path / 'text'}]", f"run.dir={tmp_path}", "run.name=first", "run.resume=must"]
    config, _ = pretrain_moe.compose(overrides)
    data = SplitPlan.of(config.data, config.model.seq_length, "train", build_tokenizer(config.data))
    directory = tmp_path / "first" / "checkpoints" / directory_name(7)
    directory.mkdir(parents=True)
    manifest = Manifest(
        run_id=RunId.make(tmp_path / "first", is_older=False).run_id,
        run_name="first",
        generation=0,
        topology={"world_size": 1},
        iteration=7,
        consumed_samples=0,
        settings=settings_of(config, data_fingerprint=data.fingerprint(), vocab_size=resolve_vocab_size(config)),
        software={},
        files=(),
    )
    manifest.write(directory)
    return overrides


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["optimizer.lr=0.5", "model.num_layers=6"], ["optimizer.lr: was 0.001, now 0.5", "model.num_layers: was"]),
        (["data.seed=77"], ["data.seed: was 1234, now 77"]),
    ],
)
def test_a_resume_with_other_settings_is_refused_before_anything_starts(
    saved_run: list[str], changed: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch("megatron_ft.control.launcher.launch", return_value=0) as launch:
        assert pretrain_moe.main([*saved_run, *changed]) == CheckpointError.exit_code
        assert not launch.called
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "was written with other settings" in line]
        assert line.startswith("error: ") and all(text in line for text in named)
        assert pretrain_moe.main([*saved_run, "launch.num_nodes=2", "telemetry.log_interval_iterations=3"]) == 0
        assert launch.called, "the layout and what is reported are free"


def test_a_dry_run_refuses_a_resume_with_other_settings(
    saved_run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain_moe.main([*saved_run, "optimizer.lr=0.5", "dry_run=true"]) == CheckpointError.exit_code
    assert "optimizer.lr: was" in capsys.readouterr().err
    assert pretrain_moe.main([*saved_run, "dry_run=true"]) == 0


def test_a_missing_compiler_is_refused_before_ranks_start(
    machine: Callable[[DeviceFacts], mock.Mock], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    launch, job = machine(NO_GPU), ["placement=spread", "launch.num_nodes=4"]
    refusal = "placement.dispatch_backend=auto: no compiler found for cpp (tried no-such-compiler); install a C++17"
    assert pretrain_moe.main(job) == 2
    refused = capsys.readouterr().err
    assert refusal in refused and "placement.dispatch_backend=reference" in refused
    assert not launch.called
    assert pretrain_moe.main([*job, "dry_run=true"]) == 0
    assert f"note: {refusal}" in capsys.readouterr().out
    assert pretrain_moe.main([*job, "dry_run=true", "launch=srun"]) == 0
    assert "no compiler" not in capsys.readouterr().out, "the nodes are other machines"
    for needless in (job[1:], [*job, "placement.dispatch_backend=reference"]):
        assert pretrain_moe.main(needless) == 0
    assert launch.call_count == 2


def test_the_job_of_the_slurm_page_fits_its_gpus_and_says_what_a_lost_node_costs(
    machine: Callable[[DeviceFacts], mock.Mock], capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "slurm" / "README.md").read_text()
    (command,) = re.findall(r"^python3 slurm/submit\.py --nodes (\d+) (.*)$", page, re.MULTILINE)
    (ranks_per_node,) = re.findall(r"MFT_RANKS_PER_NODE=(\d+)$", page, re.MULTILINE)
    sizes = [f"launch.num_nodes={command[0]}", "nodes.num_spare_nodes=0", f"launch.ranks_per_node={ranks_per_node}"]
    machine(NO_GPU)
    assert pretrain_moe.main(["launch=slurm", *sizes, *command[1].split(), "dry_run=true", "dry_run_format=json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["device"] == "cuda" and plan["gpu_memory_bytes"] is not None
    names = ("weights_bytes", "gradients_bytes", "master_bytes", "moments_bytes", "activations_bytes")
    needed = max(sum(stage["memory"][name] for name in names) for stage in plan["stages"])
    assert 0 < needed <= plan["gpu_memory_bytes"] and not plan["notes"]
    gone = [cost for cost in plan["losses"] if cost["is_gone"]]
    assert {(cost["strategy"], cost["medium"], cost["restarted_by"]) for cost in gone} == {
        ("rollback", "persisted", "Slurm")
    } and len(gone) == 8
    assert "continues from the newest window or" in page


def _data() -> object:
    from megatron_ft.corpus.samples import DataSummary

    return DataSummary(sources=(), tokenizer_vocab_size=257, vocab_size=384, eod=256)


def test_a_dry_run_shows_the_first_placement_and_its_json_is_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas = ["dry_run=true", "placement=overlap_search", "launch.num_nodes=4", "launch.ranks_per_node=1"]
    assert pretrain_moe.main([*replicas, "dry_run_format=json"]) == 0
    placement = json.loads(capsys.readouterr().out)["placement"]
    assert placement["num_slots_per_rank"] == 4
    (tmp_path / "first.json").write_text(json.dumps(placement))
    assert pretrain_moe.main([*replicas, "placement.schedule=['1:first.json']"]) == 0
    text = capsys.readouterr().out
    assert "4 in each MoE layer: 16 on 4 ranks for 8 experts" in text and "weights left" in text
    assert "used after a loss       no: " in text and "recovery.min_nodes=null: all nodes are needed" in text
    survives = ["recovery.min_nodes=3", "parallel.use_distributed_optimizer=false"]
    assert pretrain_moe.main([*replicas, *survives]) == 0
    text = capsys.readouterr().out
    assert "weights survive" in text and "used after a loss" not in text


def test_a_trace_that_starts_over_is_said_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loads.json").write_text(json.dumps([[1] * 8] * 4))
    trace = ["model.router=trace", "model.router_trace_file=loads.json"]
    with mock.patch("megatron_ft.control.launcher.launch", return_value=0) as launch:
        assert pretrain_moe.main(trace) == 0
    assert launch.called
    assert "note: loads.json has one record" in capsys.readouterr().err


SEARCH = "megatron_ft.planning.placement.overlap_search.OverlapSearch"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["placement=overlap_search", "placement.algorithm.seed=3"], {"_target_": SEARCH, "seed": 3}),
        (["+placement.algorithm.seed=3", "placement=overlap_search"], {"_target_": SEARCH, "seed": 3}),
        ([f"placement.algorithm={{_target_: {SEARCH}, seed: 3}}"], {"_target_": SEARCH, "seed": 3}),
        (["placement.algorithm.seed=3"], {"seed": 3}),
        (["placement=overlap_search", "placement.algorithm=null"], None),
        (
            ["placement=overlap_search", "placement.algorithm.objective.lost_weights=[0.5,1]"],
            {"_target_": SEARCH, "objective": {"lost_weights": [0.5, 1]}},
        ),
    ],
)
def test_fields_of_a_policy_are_set_like_any_key(overrides: list[str], expected: dict[str, object] | None) -> None:
    config, text = pretrain_moe.compose(overrides)
    assert config.placement.algorithm == expected
    assert yaml.safe_load(text)["placement"]["algorithm"] == expected


@pytest.mark.parametrize("override", ["placement.algorithms.seed=3", "placement.algorithm=3", "placement.seed=3"])
def test_only_fields_of_a_policy_are_open(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0].replace(".", r"\.")):
        pretrain_moe.compose([override])


def test_the_checkpoint_to_load_is_checked_before_ranks_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / ".metadata").write_bytes(b"")  # as a checkpoint of another project has it
    for name, reason in (
        ("missing", "must be an existing directory"),
        ("bare", "If you trust their origin, set checkpoint.trust=true"),
    ):
        given = ["dry_run=true", f"checkpoint.load={tmp_path / name}"]
        assert pretrain_moe.main(given) == CheckpointError.exit_code
        assert reason in capsys.readouterr().err
    assert pretrain_moe.main([*given, "checkpoint.trust=true"]) == 0


def test_the_planned_number_of_slots_is_in_the_configuration_that_is_kept() -> None:
    """Ranks and a dry run use the same number, and ``config.yaml`` records it."""
    given = [
        "model=moe_tiny",
        "placement=overlap_search",
        "launch.num_nodes=4",
        "limits.host_memory_bytes=100000000000",
    ]
    config, config_yaml = pretrain_moe.compose([*given, "training.device=cpu"])
    plan = pretrain_moe.resolve_plan(config)
    decided, decided_yaml = pretrain_moe._decide(config, config_yaml, plan)
    assert (derive_placement(config).placement.num_slots_per_rank, plan.num_slots_per_rank) == (4, 6)
    assert decided.placement.num_slots_per_rank == 6
    assert yaml.safe_load(decided_yaml) == to_dict(decided)


def test_domains_that_slurm_names_are_in_the_configuration_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_program(tmp_path, "scontrol", "echo SwitchName=s1 Level=0 LinkSpeed=1 Nodes=node[0-1]")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    given = pretrain_moe.compose(
        ["launch=slurm", "launch.num_nodes=2", "topology.failure_domain_source=slurm_topology"]
    )
    for name, value in (("SLURM_JOB_ID", "17"), ("SLURM_JOB_NODELIST", "node[0-1]")):
        monkeypatch.setenv(name, value)
    config, config_yaml = pretrain_moe.read_failure_domains(*given)
    assert config.topology.failure_domains == ["s1", "s1"]
    assert yaml.safe_load(config_yaml) == to_dict(config)
    assert "s1 (nodes 0, 1)" in capsys.readouterr().err
    asked = dataclasses.replace(given[0], dry_run=True)
    assert pretrain_moe.read_failure_domains(asked, given[1]) == (asked, given[1]), "there may be no nodes yet"
