"""Claim ``resume-remembers``: a job that gets only the name of a run continues the run with its own configuration.

One run trains without a stop, with a dozen overrides. Another run with the same overrides stops half way and is
resumed with nothing but its name. What both report for each iteration is compared with ``atol=0``. Then overrides are
tried on the stopped run: those that would change data, model, optimizer or schedule must be refused, all others must be
accepted.
"""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pretrain_moe
from benchmarks.report import finish, parse_arguments
from benchmarks.source import ROOT
from megatron_ft.config.job import JobConfig

ID = "resume-remembers"
NUM_ITERATIONS = 6
TIMEOUT_SECONDS = 240.0
GIVEN = (
    "model=moe_micro",
    "precision=bf16",
    f"training.train_iterations={NUM_ITERATIONS}",
    "training.global_batch_size=4",
    "training.eval_interval_iterations=0",
    "training.seed=7",
    "data.seed=8",
    "optimizer.lr=3e-3",
    "optimizer.lr_warmup_iterations=1",
    "optimizer.lr_decay_iterations=9",
    "optimizer.clip_grad=0.5",
    "model.hidden_dropout=0.1",
    "telemetry.wandb=disabled",
    "telemetry.progress=plain",
)
REFUSED = (
    "data.seed=9",
    "data.valid_fraction=0.1",
    "model.num_layers=8",
    "model.hidden_dropout=0.0",
    "model.moe_router_topk=1",
    "model=moe_tiny",
    "training.seed=9",
    "precision=fp32",
    "optimizer.lr=1e-3",
    "optimizer.min_lr=1e-3",
    "optimizer.lr_decay_style=linear",
    "optimizer.lr_decay_iterations=20",
    "optimizer.weight_decay=0.0",
    "optimizer.clip_grad=1.0",
    "training.global_batch_size=8",
    "training.frozen=experts",
    "parallel.use_distributed_optimizer=false",
)
ACCEPTED = (
    "launch.ranks_per_node=2",
    "launch.num_nodes=2",
    "parallel=ep2 launch.ranks_per_node=2",
    "training.micro_batch_size=1",
    "training.train_iterations=12",
    "training.eval_interval_iterations=3",
    "checkpoint.save_interval_iterations=2",
    "snapshot=sparse_window snapshot.num_peer_copies=0",
    "telemetry.log_interval_iterations=2",
    "optimizer.lr=1e-3 run.allow_change=[optimizer.lr]",
    "data.seed=9 run.allow_change=[data.seed]",
    "optimizer.lr_decay_style=constant run.allow_change=[optimizer.lr_decay_style]",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the jobs and try the overrides. The quick variant does not train with an allowed change."""
    arguments = parse_arguments(__doc__, argv)
    with tempfile.TemporaryDirectory(prefix="resume-remembers-") as name:
        runs = Path(name)
        here = (f"run.dir={runs}", f"data.cache_dir={runs / 'cache'}")
        problems = _trains([*here, *GIVEN, "run.name=whole"])
        problems += _trains([*here, *GIVEN, "run.name=part", f"training.exit_at_iteration={NUM_ITERATIONS // 2}"])
        alone = [f"run.dir={runs}", "run.name=part", "run.resume=must"]
        refused = [text for override in REFUSED if (text := _is_refused(alone, override))]
        accepted = [text for override in ACCEPTED if (text := _is_accepted(alone, override))]
        problems += _trains(alone)
        problems += differences(_iterations(runs / "whole"), _iterations(runs / "part"))
        problems += _says_nothing_to_do(alone)
        problems += [*refused, *accepted]
        if not arguments.quick:
            change = ["optimizer.lr=1e-3", "run.allow_change=[optimizer.lr]"]
            problems += _trains([*alone, *change, f"training.train_iterations={NUM_ITERATIONS + 2}"])
            if len(_iterations(runs / "part")) != NUM_ITERATIONS + 2:
                problems.append("the run did not go on with an allowed change")
    for problem in problems:
        print(problem, file=sys.stderr)
    figure = (
        f"{NUM_ITERATIONS} of {NUM_ITERATIONS} iterations equal, {len(REFUSED) - len(refused)} of {len(REFUSED)} "
        f"changes refused, {len(ACCEPTED) - len(accepted)} of {len(ACCEPTED)} accepted"
    )
    return finish(
        arguments.out,
        ID,
        passed=not problems,
        figure=figure if not problems else f"{len(problems)} problems",
        threshold="all iterations equal (atol=0), all changes of meaning refused, all others accepted",
        counts={"refused": len(REFUSED), "accepted": len(ACCEPTED), "problems": len(problems)},
        details={"problems": problems},
    )


def _trains(overrides: Sequence[str]) -> list[str]:
    """Run a job. Return its output if it fails."""
    command = [sys.executable, str(ROOT / "pretrain_moe.py"), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    return [] if done.returncode == 0 else [f"{' '.join(overrides)}: exit code {done.returncode}: {done.stderr[-800:]}"]


def _start(overrides: Sequence[str]) -> tuple[int, str, JobConfig | None]:
    """Run a command line in this process without starting ranks. Return exit code, stderr and the job's
    configuration."""
    with (
        mock.patch("megatron_ft.control.launcher.launch", return_value=0) as launch,
        mock.patch("pretrain_moe._reached_end", return_value=None),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = pretrain_moe.main(list(overrides))
    return code, err.getvalue(), launch.call_args.args[0] if launch.called else None


def _is_refused(alone: Sequence[str], override: str) -> str:
    """Return a problem unless the override is refused before a start, with an error that names its key."""
    code, text, started = _start([*alone, *override.split()])
    keys = (override.partition("=")[0], "model." if override.startswith("model=") else "precision.params_dtype")
    if code == 2 and started is None and any(key in text for key in keys):
        return ""
    return f"{override}: was not refused by its key: exit code {code}: {text}"


def _is_accepted(alone: Sequence[str], override: str) -> str:
    """Return a problem unless the override is accepted and all other keys keep the values of the run."""
    code, text, started = _start([*alone, *override.split()])
    if code != 0 or started is None:
        return f"{override}: was not accepted: exit code {code}: {text}"
    remembers = started.precision.params_dtype == "bf16" and started.optimizer.clip_grad == 0.5
    return "" if remembers and started.training.exit_at_iteration is None else f"{override}: other keys were forgotten"


def _iterations(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return loss, gradient norm and learning rate by iteration."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    names = ("loss", "grad_norm", "learning_rate", "aux_loss", "consumed_samples")
    return {record["iteration"]: {name: record[name] for name in names if name in record} for record in records}


def differences(whole: dict[int, dict[str, Any]], part: dict[int, dict[str, Any]]) -> list[str]:
    """Return the iterations in which two runs differ."""
    if len(whole) != NUM_ITERATIONS or not all("loss" in each for each in whole.values()):
        return [f"the undisturbed run reported {len(whole)} of {NUM_ITERATIONS} iterations"]
    return [
        f"iteration {number}: {whole[number]} != {part.get(number)}"
        for number in whole
        if whole[number] != part.get(number)
    ]


def _says_nothing_to_do(alone: Sequence[str]) -> list[str]:
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = pretrain_moe.main(list(alone))
    is_said = code == 0 and "nothing to do" in err.getvalue()
    return [] if is_said else [f"a finished run: exit code {code}: {err.getvalue()}"]


if __name__ == "__main__":
    sys.exit(main())
