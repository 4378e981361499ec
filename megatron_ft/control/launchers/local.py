"""``launch.node_launcher=local``: all nodes on this machine, with one fork server."""

import subprocess

from megatron_ft.control.launchers.base import ProcessLauncher, log_name
from megatron_ft.control.launchers.processes import tell
from megatron_ft.control.node.agent import AgentSpec


class LocalLauncher(ProcessLauncher):
    """Starts each agent as a process of this machine."""

    is_local = True

    def start_process(self, node: int, spec: AgentSpec) -> "subprocess.Popen[bytes]":
        started = self.context.processes.start("megatron_ft.control.node.agent", [], log_name(node), {})
        process: subprocess.Popen[bytes] = started
        tell(process, spec.to_line())
        return process
