"""Defines a launcher as another package would. It starts agents on this machine, each through ``nice``."""

import subprocess
import sys

from megatron_ft.control.launchers.base import ProcessLauncher, log_name
from megatron_ft.control.launchers.processes import tell
from megatron_ft.control.node.agent import AgentSpec


class WrappedLauncher(ProcessLauncher):
    """Starts each agent with a lower priority."""

    is_local = True

    def start_process(self, node: int, spec: AgentSpec) -> "subprocess.Popen[bytes]":
        """See ``ProcessLauncher``."""
        with (self.context.run_dir / "wrapped.txt").open("a") as nodes:
            nodes.write(f"{node}\n")
        started = self.context.processes.start(
            "megatron_ft.control.node.agent", [], log_name(node), {}, through=["nice", "-n", "1"]
        )
        process: subprocess.Popen[bytes] = started
        assert sys.executable in process.args  # type: ignore[operator]
        tell(process, spec.to_line())
        return process
