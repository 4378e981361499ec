"""Runs a dummy rank under torchrun or srun: ``python -m tests.helpers.standalone_rank RUNS ITERATIONS FAILPOINTS``.

The environment variable ``RUN_NAME`` names the run, which the rank then continues.
"""

import os
import sys
from dataclasses import replace

from megatron_ft.config.job import JobConfig
from megatron_ft.control.launchers.torchrun import RankEnvironment, detect
from megatron_ft.mcore import standalone
from megatron_ft.testing import dummy_rank


def main() -> int:
    """Join the job and act as its rank."""
    config = JobConfig()
    name = os.environ.get("RUN_NAME")
    config.run = replace(config.run, dir=sys.argv[1], name=name, resume="never" if name is None else "auto")
    config.telemetry = replace(config.telemetry, wandb="disabled")
    config.training = replace(config.training, train_iterations=int(sys.argv[2]))
    config.testing = replace(config.testing, failpoints=sys.argv[3:])
    environment = RankEnvironment.read(detect(os.environ), os.environ)
    environment.check_restarts(config.run)
    return standalone.main(config, environment, dummy_rank.run)


if __name__ == "__main__":
    sys.exit(main())
