"""Starts a controller's process as a launcher does, and takes the place of the launcher, for jobs without ranks."""

import contextlib
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from megatron_ft.config.job import JobConfig
from megatron_ft.config.serialize import to_dict
from megatron_ft.control.admin import ControllerAddress
from megatron_ft.control.controller.link import ControllerLink
from megatron_ft.control.controller.main import ControllerSpec
from megatron_ft.control.report import JobResult
from megatron_ft.control.rpc import new_token
from megatron_ft.framing import Message

READY_SECONDS = 60.0


@dataclass(slots=True)
class RealController:
    """Controller of one job, and its messages to its launcher."""

    link: ControllerLink
    run_dir: Path
    token: str
    events: list[Message] = field(default_factory=list)
    end: JobResult | None = None
    address: str = ""
    process: psutil.Process | None = None

    def serve(self) -> None:
        """Act as the launcher in a thread until the job has ended."""
        self.end = self.link.run(lambda _record: None, self.events.append)

    @property
    def num_replaced(self) -> int:
        """Return how often a new controller has replaced the previous one."""
        return sum(event["event"] == "replaced" for event in self.events)

    @property
    def cpu_seconds(self) -> float:
        """Return the CPU time that the controller's process has used."""
        assert self.process is not None, "it has begun"
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def real_controller(
    run_dir: Path, num_nodes: int, ranks_per_node: int, *, num_descriptors: int | None = None
) -> Iterator[RealController]:
    """Start a controller whose job can continue with one node. It ends after the block.

    Args:
        num_descriptors: Soft and hard limit of the open files of its process; None for the limits of this process.
    """
    config = JobConfig()
    launch = replace(config.launch, num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    recovery = replace(config.recovery, min_nodes=1)
    token = new_token()

    def limit() -> None:
        if num_descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (num_descriptors, num_descriptors))

    def start(console: socket.socket) -> "subprocess.Popen[bytes]":
        spec = ControllerSpec(
            config=to_dict(replace(config, launch=launch, recovery=recovery)),
            run_dir=str(run_dir),
            resume_from=None,
            entry="",
            working_dir=str(run_dir),
            token=token,
            launcher_descriptor=console.fileno(),
        )
        command = [sys.executable, "-m", "megatron_ft.control.controller.main"]
        kept = (console.fileno(),)
        with (run_dir / "controller.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=kept, preexec_fn=limit
            )
        assert process.stdin is not None, "asked for"
        process.stdin.write(spec.to_line())
        process.stdin.flush()
        return process

    access = run_dir / "controller.json"
    link = ControllerLink(start, access_path=access, access={"token": token, "tls_dir": None}, silence_seconds=30.0)
    found = RealController(link, run_dir, token)
    link.begin()
    console = threading.Thread(target=found.serve, name="console", daemon=True)
    console.start()
    try:
        pause = threading.Event()
        for _ in range(int(READY_SECONDS / 0.02)):
            if access.exists() or pause.wait(0.02):
                break
        about = ControllerAddress.read(run_dir)
        found.address = about.address
        found.process = psutil.Process(link._process.pid if link._process is not None else 0)
        yield found
    finally:
        link.close()
        console.join(timeout=READY_SECONDS)
