"""Tests Hydra's options at the entry point, additional folders of configuration, and sweeps."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import pretrain_moe
from hydra_entry import Options, SweepJob, compose, run_sweep, sweep_jobs, sweep_table
from megatron_ft.errors import EXIT_INTERRUPTED, ConfigError

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "megatron", "wandb", "transformer_engine"}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for key in ("SLURM_PROCID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(key, raising=False)


def options(*words: str) -> Options:
    return Options.parse(words, pretrain_moe.CONF)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command line prints. It must succeed."""
    assert pretrain_moe.main(list(words)) == 0
    return capsys.readouterr().out


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Create a folder with an experiment, an option of a group and a primary file."""
    folder = tmp_path / "mine"
    for name, text in {
        "experiment/large_steps.yaml": "# @package _global_\ndefaults: [override /model: own]\noptimizer: {lr: 0.5}\n",
        "model/own.yaml": "name: own\nnum_layers: 2\n",
        "top.yaml": "defaults:\n  - config\n  - _self_\ntraining:\n  train_iterations: 7\n",
        "sweep.yaml": "defaults: [config, _self_]\nhydra: {sweeper: {params: {optimizer.lr: '1,2'}}}\n",
        "bare.yaml": "training:\n  train_iterations: 7\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_cfg_prints_the_configuration_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    tree = yaml.safe_load(shown(capsys, "--cfg", "job", "optimizer.lr=0.25", "run.name=lr${optimizer.lr}"))
    assert tree["optimizer"]["lr"] == 0.25 and tree["run"]["name"] == "lr${optimizer.lr}" and "hydra" not in tree
    assert "name: lr0.25" in shown(
        capsys, "--cfg", "job", "--resolve", "optimizer.lr=0.25", "run.name=lr${optimizer.lr}"
    )
    assert shown(capsys, "-c", "job", "-p", "parallel", "parallel=ep2").startswith("# @package parallel\n")


def test_cfg_prints_hydras_own_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(yaml.safe_load(shown(capsys, "--cfg", "hydra"))) == {"hydra"}
    tree = yaml.safe_load(shown(capsys, "--cfg", "all", "hydra.job.name=mine"))
    assert tree["hydra"]["job"]["name"] == "mine" and tree["model"]["name"] == "moe_tiny"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("defaults", "model/moe_micro"),
        ("defaults-tree", "model: moe_micro"),
        ("searchpath", "structured://"),
        ("config", "num_layers"),
        ("plugins", "BasicSweeper"),
    ],
)
def test_info(what: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text in shown(capsys, "--info", what, "model=moe_micro")


def test_experiments_and_options_may_be_outside_the_clone(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = compose(options("--config-dir", str(outside), "experiment=large_steps"))
    assert (config.optimizer.lr, config.model.name, config.model.num_layers) == (0.5, "own", 2)
    assert pretrain_moe.main(["experiment=large_steps"]) == ConfigError.exit_code
    assert pretrain_moe.main(["--config-dir=nowhere"]) == ConfigError.exit_code
    assert "--config-dir=nowhere: must be a folder" in capsys.readouterr().err


def test_another_primary_file(outside: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = compose(options("-cd", str(outside), "-cn", "top", "optimizer.lr=0.5"))
    assert (config.training.train_iterations, config.optimizer.lr) == (7, 0.5)
    assert pretrain_moe.main(["--config-dir", str(outside), "--config-name", "bare"]) == ConfigError.exit_code
    assert "begin its defaults with '- config'" in capsys.readouterr().err
    copy = compose(options("--config-path", str(pretrain_moe.CONF), "model=moe_micro"))[0]
    assert copy == compose(options("model=moe_micro"))[0]


def test_keys_of_hydra_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for word, text in (
        ("hydra.run.dir=x", "run.dir and run.name set"),
        ("hydra/launcher=basic", "one after the other"),
        ("hydra.nonsense=1", "not a known key"),
    ):
        assert pretrain_moe.main([word]) == ConfigError.exit_code
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--cfg", "jobs"], "invalid choice"),
        (["--resolve"], "add --cfg job"),
        (["--cfg", "job", "-p", "modle"], "must be a key"),
        (["--experimental-rerun", "x"], "use run.resume"),
        (["--shell-completion"], "install=bash"),
        (["--nonsense"], "must be --help"),
    ],
)
def test_wrong_options_are_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_moe.main(words) == ConfigError.exit_code
    assert text in capsys.readouterr().err


def test_hydra_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--multirun" in shown(capsys, "--hydra-help")


def test_the_shell_completes_groups_and_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "COMP_LINE" in shown(capsys, "--shell-completion", "install=bash")
    for line, found in (("model=moe_m", "model=moe_micro"), ("training.train_it", "training.train_iterations=")):
        monkeypatch.setenv("COMP_LINE", f"python pretrain_moe.py {line}")
        assert found in shown(capsys, "-sc", "query=bash").split()


@pytest.mark.parametrize("words", [["--cfg", "job"], ["optimizer.lr=x"], ["--hydra-help"]])
def test_quick_answers_import_nothing_heavy(words: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", str(ROOT / "pretrain_moe.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode in (0, ConfigError.exit_code) and "megatron_ft" in imported and not imported & HEAVY


def test_a_sweep_has_a_run_for_each_combination() -> None:
    jobs = sweep_jobs(options("-m", "model=moe_micro,moe_tiny", "optimizer.lr=1e-3,1e-4", "training.num_threads=2"))
    assert [job.swept for job in jobs] == [
        ("model=moe_micro", "optimizer.lr=0.001"),
        ("model=moe_micro", "optimizer.lr=0.0001"),
        ("model=moe_tiny", "optimizer.lr=0.001"),
        ("model=moe_tiny", "optimizer.lr=0.0001"),
    ]
    assert [job.config.optimizer.lr for job in jobs] == [0.001, 0.0001] * 2
    assert all(job.config.training.num_threads == 2 for job in jobs)
    assert len({job.run_dir for job in jobs}) == 4


def test_jobs_of_a_sweep_have_names() -> None:
    named = [job.config.run.name for job in sweep_jobs(options("-m", "run.name=a", "optimizer.lr=1,2"))]
    assert named == ["a-0", "a-1"]
    named = [job.config.run.name for job in sweep_jobs(options("-m", "run.name=lr${optimizer.lr}", "optimizer.lr=1,2"))]
    assert named == ["lr1.0", "lr2.0"]
    with pytest.raises(ConfigError, match="must not be the same for two jobs"):
        sweep_jobs(options("-m", "run.name=${model.name}", "optimizer.lr=1,2"))


@pytest.mark.extended
def test_ranges_globs_and_parameters_of_the_sweeper(outside: Path) -> None:
    assert len(sweep_jobs(options("--multirun", "optimizer.lr=range(1,4)"))) == 3
    num_precisions = len(list((ROOT / "conf" / "precision").glob("*.yaml")))
    assert len(sweep_jobs(options("--multirun", "precision=glob(*)"))) == num_precisions >= 5
    found = sweep_jobs(options("-cd", str(outside), "-cn", "sweep", "hydra.mode=MULTIRUN"))
    assert [job.config.optimizer.lr for job in found] == [1.0, 2.0]


def test_a_wrong_job_ends_the_sweep_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["optimizer.lr=1,x"], "optimizer.lr=x: must be of type float"),
        (["model=moe_micro,moe_huge"], "must be one of"),
        (["training.train_iterations=5,0"], "training.train_iterations=0"),
        (["modle.num_layers=1,2"], "not a known key"),
    ):
        assert pretrain_moe.main(["-m", "dry_run=true", *words]) == ConfigError.exit_code
        captured = capsys.readouterr()
        assert text in captured.err and "job 0" not in captured.err


@pytest.mark.extended
def test_jobs_run_one_after_the_other_and_end_in_one_table(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "dry_run=true", "launch.ranks_per_node=1,2", "limits.host_memory_bytes=1,null"]
    assert pretrain_moe.main(words) == ConfigError.exit_code, "of the first job that fails"
    captured = capfd.readouterr()
    table = captured.out.splitlines()[-5:]
    assert table[0].split()[:3] == ["job", "exit", "code"]
    assert [line.split()[:2] for line in table[1:]] == [["0", "2"], ["1", "0"], ["2", "2"], ["3", "0"]]
    assert "job 3 of 4: launch.ranks_per_node=2 limits.host_memory_bytes=null" in captured.err


def test_a_signal_ends_the_sweep(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        f"os.kill({os.getpid()}, signal.SIGTERM)\n"
        "signal.pause()\n"
    )
    before = signal.getsignal(signal.SIGTERM)
    assert run_sweep(options("-m", "optimizer.lr=1,2"), script) == EXIT_INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before
    assert "not started" in capfd.readouterr().out


def test_the_table_has_the_figures_of_each_run(tmp_path: Path) -> None:
    config, _ = compose(options(f"run.dir={tmp_path}", "run.name=a"))
    (tmp_path / "a").mkdir()
    figures = {"iterations": 60, "final_loss": 1.5, "evaluation_loss": None, "wall_seconds": 12.25}
    (tmp_path / "a" / "summary.json").write_text(json.dumps(figures))
    lines = sweep_table([SweepJob(overrides=(), swept=("optimizer.lr=1",), config=config)], [0]).splitlines()
    assert lines[1].split() == ["0", "0", "60", "1.5000", "-", "12.2", str(tmp_path / "a"), "optimizer.lr=1"]


def test_ranks_cannot_sweep(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    assert pretrain_moe.main(["-m", "optimizer.lr=1,2"]) == ConfigError.exit_code
    assert "must not be started by torchrun" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
def test_each_job_of_a_sweep_trains(tmp_path: Path) -> None:
    words = ["model=moe_micro", "training.train_iterations=2", "training.eval_interval_iterations=0"]
    words += ["checkpoint.save_at_end=false", "telemetry.wandb=disabled", f"run.dir={tmp_path}", "run.name=s"]
    command = [sys.executable, str(ROOT / "pretrain_moe.py"), "-m", *words, "optimizer.lr=1e-3,1e-4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()[-2:]]
    assert [row[:3] for row in rows] == [["0", "0", "2"], ["1", "0", "2"]]
    assert [yaml.safe_load((tmp_path / f"s-{n}" / "config.yaml").read_text())["optimizer"]["lr"] for n in (0, 1)] == [
        0.001,
        0.0001,
    ]
