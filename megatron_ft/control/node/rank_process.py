"""Entry point of a forked process, which runs one rank as described in a spec."""

import dataclasses
import faulthandler
import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path

from megatron_ft.config.serialize import from_dict
from megatron_ft.control.node.fork_server import HELD_SIGNALS
from megatron_ft.control.node.worker_client import AgentClient, Identity, RankContext, StopFlag
from megatron_ft.errors import MegatronFtError, RankLost
from megatron_ft.framing import Message

UNEXPECTED_EXIT_CODE = 1


def run(spec: Message) -> int:
    """Run the rank that ``spec`` describes. Return the process's exit code.

    ``spec`` contains ``entry`` (``package.module:function``), ``config`` (JSON of ``JobConfig``), ``agent_socket``,
    ``environment``, ``working_dir``, ``can_survive`` (whether the rank may continue after a loss), the fields of
    ``Identity`` and those of ``RankContext``.
    """
    faulthandler.enable()
    stop = StopFlag()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The handler is installed before the signal is unblocked: it then receives a stop request that came since the fork.
    stop.install(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)
    # The fork server's environment limits libraries to one thread, so a rank gets an environment of its own.
    os.environ.clear()
    os.environ.update(spec["environment"])
    os.chdir(spec["working_dir"])
    identity = Identity(**{field.name: spec[field.name] for field in dataclasses.fields(Identity)})
    worker = AgentClient(spec["agent_socket"], identity, stop=stop, can_survive=spec["can_survive"])
    try:
        module, _, function = spec["entry"].partition(":")
        is_complete = getattr(import_module(module), function)(from_dict(spec["config"]), _context(spec, worker))
    except BaseException as error:  # noqa: BLE001 - every failure is reported
        return _report_failure(worker, error)
    worker.done(is_complete=bool(is_complete))
    worker.close()
    return 0


def _context(spec: Message, worker: AgentClient) -> RankContext:
    names = ("rank", "world_size", "local_rank", "node", "num_nodes", "generation", "master_addr", "master_port")
    resume_from = spec["resume_from"]
    return RankContext(
        **{name: spec[name] for name in names},
        run_dir=Path(spec["run_dir"]),
        resume_from=None if resume_from is None else Path(resume_from),
        worker=worker,
        sidecars=spec["sidecars"],
        nodes=tuple(spec["nodes"]),
        local_ranks=tuple(spec["local_ranks"]),
        members=tuple(spec["members"]),
        is_joining=spec["is_joining"],
    )


def _report_failure(worker: AgentClient, error: BaseException) -> int:
    text = "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)
    if isinstance(error, RankLost):
        return (
            # The error is not reported: the other ranks continue after an exit, but a reported error ends the job.
            error.exit_code
        )
    if isinstance(error, SystemExit) and error.code in (0, None):
        text = "the rank called sys.exit() before its work was finished\n" + text
    own_code = error.exit_code if isinstance(error, MegatronFtError) else None
    last_line = "".join(traceback.format_exception_only(error)).strip()
    worker.raised(text, error=last_line, exit_code=own_code)
    return UNEXPECTED_EXIT_CODE if own_code is None else own_code
