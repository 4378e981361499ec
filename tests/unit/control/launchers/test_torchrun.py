"""Tests how the variables of torchrun and srun are read, and which of them are refused."""

import re

import pytest

from megatron_ft.config.job import RunConfig
from megatron_ft.control.launchers.torchrun import RankEnvironment, _expand_counts, detect, expand_nodelist
from megatron_ft.control.ports import PORTS
from megatron_ft.errors import ConfigError
from megatron_ft.testing.jobs import REPOSITORY as ROOT

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
}


def test_torchrun() -> None:
    found = RankEnvironment.read("torchrun", TORCHRUN)
    assert (found.rank, found.world_size, found.local_rank, found.node, found.num_nodes) == (5, 8, 1, 1, 2)
    assert (found.master_addr, found.master_port, found.attempt, found.store_is_served) == ("10.0.0.1", 29500, 2, True)


def test_srun() -> None:
    found = RankEnvironment.read("srun", SRUN)
    assert (found.rank, found.world_size, found.local_rank, found.node, found.num_nodes) == (5, 6, 1, 2, 3)
    assert found.master_addr == "gpu07"
    assert found.master_port in PORTS
    assert (
        found.master_port
        == RankEnvironment.read("srun", {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).master_port
    )
    assert found.master_port != RankEnvironment.read("srun", {**SRUN, "SLURM_STEP_ID": "1"}).master_port
    assert RankEnvironment.read("srun", SRUN, master_port=1234).master_port == 1234


def test_every_job_has_a_port_that_the_documentation_names() -> None:
    """Firewalls are configured for these ports. Above them, the system chooses ports for outgoing connections."""
    found = {
        RankEnvironment.read("srun", {**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).master_port
        for job in range(10_000, 13_000)
        for step in (0, 1, 15)
    }
    assert found <= set(PORTS) and len(found) > len(PORTS) // 10
    about = f"uses a free port between {PORTS[0]} and {PORTS[-1]} unless `launch.master_port` names another one"
    assert about in " ".join((ROOT / "SECURITY.md").read_text(encoding="utf-8").split())


def test_a_job_without_step_variables_is_read_from_the_job() -> None:
    job = {name.replace("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"): value for name, value in SRUN.items()}
    job["SLURM_TASKS_PER_NODE"] = job.pop("SLURM_STEP_TASKS_PER_NODE")
    assert RankEnvironment.read("srun", job).master_addr == "gpu07"


def test_who_started_this_process() -> None:
    assert detect({}) == "local"
    assert detect(TORCHRUN) == "torchrun"
    assert detect(SRUN) == "srun"
    assert detect(SRUN | TORCHRUN) == "torchrun", "torchrun inside srun"
    assert detect({"RANK": "0"}) == "local", "a stray variable of another tool"


@pytest.mark.parametrize(
    ("mode", "change", "word"),
    [
        ("torchrun", {"RANK": None}, "RANK"),
        ("torchrun", {"RANK": "five"}, "whole number"),
        ("torchrun", {"RANK": "-1"}, "whole number"),
        ("torchrun", {"RANK": "8"}, "rank 8 must be from 0 to 7"),
        ("torchrun", {"LOCAL_WORLD_SIZE": "3"}, "must be a multiple of 3"),
        ("torchrun", {"LOCAL_RANK": "4"}, "local rank 4"),
        ("torchrun", {"LOCAL_RANK": "2"}, "node by node"),
        ("srun", {"SLURM_STEP_NODELIST": None}, "SLURM_STEP_NODELIST"),
        (
            "srun",
            {"SLURM_STEP_NODELIST": "gpu[07-08]"},
            "variables do not agree: 2 nodes, 6 tasks, tasks per node [2, 2, 2]",
        ),
        ("srun", {"SLURM_STEP_TASKS_PER_NODE": "3,2,1"}, "same number of tasks on every node"),
        ("srun", {"SLURM_LOCALID": "0"}, "node by node"),
    ],
)
def test_contradictions_are_refused(mode: str, change: dict[str, str | None], word: str) -> None:
    variables = {**(TORCHRUN if mode == "torchrun" else SRUN), **change}
    with pytest.raises(ConfigError) as caught:
        RankEnvironment.read(mode, {name: value for name, value in variables.items() if value is not None})
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node0", ["node0"]),
        ("a,b", ["a", "b"]),
        ("node[0-2]", ["node0", "node1", "node2"]),
        ("a[01-03,7],b", ["a01", "a02", "a03", "a7", "b"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[1-2].x", ["r1n1.x", "r1n2.x", "r2n1.x", "r2n2.x"]),
        ("z,a[2,1]", ["z", "a2", "a1"]),
    ],
)
def test_nodelists(text: str, hosts: list[str]) -> None:
    assert expand_nodelist("NODES", text) == hosts


@pytest.mark.parametrize(
    "text", ["", "a[", "a]", "a[1-", "a[3-1]", "a[x]", "a[[1]]", "a b", "a[]", "a[0-99999999]", "$(x)"]
)
def test_what_is_no_nodelist(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'NODES={text}: ')}(must|has)"):
        expand_nodelist("NODES", text)


def test_counts() -> None:
    assert _expand_counts("COUNTS", "2(x3),1") == [2, 2, 2, 1]
    assert _expand_counts("COUNTS", "8") == [8]
    with pytest.raises(ConfigError, match="^COUNTS=2x3: must look like"):
        _expand_counts("COUNTS", "2x3")


@pytest.mark.parametrize(
    ("of_step", "of_job", "wrong"),
    [
        ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "gpu[9-7]"),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "2x3"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "six"),
    ],
)
def test_an_error_names_the_variable_that_was_read(of_step: str, of_job: str, wrong: str) -> None:
    others = {name: value for name, value in SRUN.items() if name not in (of_step, of_job)}
    with pytest.raises(ConfigError, match=f"^{of_step}={re.escape(wrong)}: "):
        RankEnvironment.read("srun", {**others, of_step: wrong, of_job: "1"})
    with pytest.raises(ConfigError, match=f"^{of_job}={re.escape(wrong)}: "):
        RankEnvironment.read("srun", {**others, of_job: wrong})


FT_LAUNCHER = {
    **TORCHRUN,
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "FT_RANK_MONITOR_IPC_SOCKET": "monitor.socket",
}


def test_ft_launcher_is_torchrun_by_another_name() -> None:
    assert detect(FT_LAUNCHER) == "torchrun"
    found = RankEnvironment.read("torchrun", FT_LAUNCHER)
    assert (found.launcher, found.program, found.max_restarts, found.store_is_served) == (
        "torchrun",
        "ft_launcher",
        3,
        False,
    )
    assert RankEnvironment.read("torchrun", TORCHRUN).program == "torchrun"


@pytest.mark.parametrize(
    ("mode", "variables", "says"),
    [
        (
            "torchrun",
            FT_LAUNCHER,
            "rank of ft_launcher. Ranks: 8, per node: 4. .* ft_launcher start all ranks again .*max_restarts=3",
        ),
        ("torchrun", {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "0"}, "rank of torchrun. .* ends the job"),
        ("srun", SRUN, "rank of srun. Ranks: 6, per node: 2. .* ends the job step"),
    ],
)
def test_a_start_says_what_is_not_there(mode: str, variables: dict[str, str], says: str) -> None:
    summary = RankEnvironment.read(mode, variables).summary()
    assert re.search(says, summary), summary
    assert "no controller and no agent" in summary


NEVER_AGAIN = {**FT_LAUNCHER, "TORCHELASTIC_MAX_RESTARTS": "0"}
STORE_THAT_LASTS = {**FT_LAUNCHER, "TORCHELASTIC_USE_AGENT_STORE": "True"}
REQUEUED = {**SRUN, "SLURM_RESTART_COUNT": "1"}


@pytest.mark.parametrize(
    ("mode", "variables"), [("torchrun", FT_LAUNCHER), ("srun", REQUEUED)], ids=["ft_launcher", "requeued"]
)
def test_a_start_that_could_not_find_its_run_again_is_refused(mode: str, variables: dict[str, str]) -> None:
    environment = RankEnvironment.read(mode, variables)
    with pytest.raises(
        ConfigError, match=r"^run\.name=null: must be given together with run\.resume=auto: .* its store does not keep"
    ):
        environment.check_restarts(RunConfig())
    with pytest.raises(ConfigError, match=r"^run\.resume=never: must be 'auto' or 'must'"):
        environment.check_restarts(RunConfig(name="first"))
    environment.check_restarts(RunConfig(name="first", resume="auto"))


@pytest.mark.parametrize(
    ("mode", "variables"),
    [("torchrun", NEVER_AGAIN), ("torchrun", STORE_THAT_LASTS), ("torchrun", TORCHRUN), ("srun", SRUN)],
    ids=["no restarts", "a store that lasts", "a restart with such a store", "a first srun"],
)
def test_others_need_no_name(mode: str, variables: dict[str, str]) -> None:
    RankEnvironment.read(mode, variables).check_restarts(RunConfig())
