"""``launch.node_launcher=srun``: runs one node on each machine of the Slurm allocation that contains this process."""

import dataclasses
import subprocess
from collections.abc import Mapping

from megatron_ft.config.job import JobConfig
from megatron_ft.control.launchers.base import LaunchContext, ProcessLauncher, log_name
from megatron_ft.control.launchers.processes import tell
from megatron_ft.control.node.agent import AgentSpec
from megatron_ft.control.node.main import NodeSpec
from megatron_ft.control.slurm.nodes import TERM_SECONDS, Allocation, address_of


class SlurmLauncher(ProcessLauncher):
    """Starts each agent with ``srun``, as a separate job step."""

    term_seconds = TERM_SECONDS

    def __init__(self, config: JobConfig, variables: Mapping[str, str]) -> None:
        super().__init__(config, variables)
        self._allocation = Allocation.read(variables, most_nodes=config.most_nodes)
        self._interface = address_of(config.control.interface)
        self._script = variables.get("MFT_SCRIPT")

    def publish(self, context: LaunchContext, spec: AgentSpec) -> None:
        super().publish(context, spec)
        self._allocation.keep_script(context.run_dir, self._script)

    def start_process(self, node: int, spec: AgentSpec) -> "subprocess.Popen[bytes]":
        through, processes = self._allocation.srun(node), self.context.processes
        started = processes.start("megatron_ft.control.node.main", [], log_name(node), {}, through=through)
        process: subprocess.Popen[bytes] = started
        # The id of the ``srun`` process identifies the agent, because this machine sees only the end of ``srun``.
        agent = dataclasses.replace(spec, process_id=process.pid)
        node_spec = NodeSpec(agent=agent, preload=list(self.context.preload), batch_job=self._allocation.job_id)
        tell(process, node_spec.to_line())
        return process
