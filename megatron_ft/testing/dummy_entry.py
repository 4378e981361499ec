"""Starts a job as ``pretrain_moe.py`` does, but its ranks have no model: ``python -m megatron_ft.testing.dummy_entry
OVERRIDE ...``.

The environment variable ``MFT_DUMMY_ENTRY`` names the function in ``megatron_ft/testing/dummy_rank.py`` that each rank
runs.
"""

import os
import sys

import pretrain_moe
from megatron_ft.config.membership import derive_placement
from megatron_ft.config.validate import validate
from megatron_ft.control.launcher import launch
from megatron_ft.errors import MegatronFtError
from megatron_ft.testing.dummy_job import FileSinks


def main() -> int:
    """Run the job that the command line describes. Return its exit code."""
    try:
        config, config_yaml = pretrain_moe.compose(sys.argv[1:])
        config, config_yaml = pretrain_moe.read_failure_domains(config, config_yaml)
        validate(config)
        return launch(
            derive_placement(config),
            config_yaml,
            open_sinks=FileSinks,
            entry=f"megatron_ft.testing.dummy_rank:{os.environ['MFT_DUMMY_ENTRY']}",
            preload=["megatron_ft.testing.dummy_rank"],
        )
    except MegatronFtError as error:
        print(error, file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
