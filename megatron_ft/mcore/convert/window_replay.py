"""Makes a dense checkpoint from a window of snapshots on storage.

The operators of a window were captured after different iterations. A separate job, in the layout of the window, replays
these iterations. It has its own run folder beside the result, with only the run's identity and this window. So the
folder of the run does not change, even if the run trains at the same time. The job loads the window, replays it, saves
a dense checkpoint and ends. It trains no further iteration.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_ft.config.job import (
    JobConfig,
    NodesConfig,
    RecoveryConfig,
    SnapshotConfig,
    TestingConfig,
    UpstreamLogConfig,
)
from megatron_ft.config.overrides import override_words
from megatron_ft.config.serialize import from_dict, to_dict
from megatron_ft.control.rundir import RUN_ID_NAME, RunId, read_run_config
from megatron_ft.errors import EXIT_CODES, EXIT_INTERRUPTED, EXIT_OK, CheckpointError, ConfigError
from megatron_ft.mcore.convert.folder import check_space
from megatron_ft.mcore.convert.weights import Progress, check_new
from megatron_ft.mcore.snapshot.local_window import CONFIG
from megatron_ft.planning.snapshot.plan import WindowKey
from megatron_ft.serde import parse_json
from megatron_ft.snapshot.storage.backends import Backend, LocalBackend, open_backend
from megatron_ft.snapshot.storage.checkpoints import directory_name
from megatron_ft.snapshot.storage.files import fsync_directory
from megatron_ft.snapshot.storage.manifest import Manifest
from megatron_ft.snapshot.storage.window_file import rank_name, window_name
from megatron_ft.snapshot.storage.window_folder import RejectedWindow, WindowFolder, persist_url
from megatron_ft.snapshot.window import Window

_CHUNK_BYTES = 4 << 20
_ADVICE = "To continue this run"
"""First words of the advice on how to continue the run, with which a failed job's output ends. ``replay_window``
does not show this advice, because it removes the folder of that run."""
Compose = Callable[[list[str]], JobConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A verified window of a run."""

    key: WindowKey
    windows: tuple[Window, ...]
    """Descriptions of the parts of the window, one part per rank, in rank order."""
    files: tuple[tuple[str, str], ...]
    """Directory and name of each file that a replay reads. Files of earlier windows can be among them."""

    @property
    def first(self) -> Window:
        """Rank 0's part of the window."""
        return self.windows[0]

    def dense_bytes(self, item_bytes: int) -> int:
        """Return the size in bytes of the resulting weights (``item_bytes`` per element) and optimizer state."""
        pieces = [piece for window in self.windows for part in window.slices for piece in part.pieces]
        elements = sum(piece.stop - piece.start for piece in pieces if piece.component == "exp_avg")
        return elements * (12 + item_bytes)  # master weights and two moments in FP32

    def leaves_out(self) -> bool:
        """Return whether some experts in the window were not captured for it, but copied from earlier windows."""
        return any(window.leaves_out_experts for window in self.windows)


def replay_window(
    run_dir: Path, out: Path, *, name: str | None = None, compose: Compose, entry: Path, progress: Progress = print
) -> Manifest:
    """Replay a window of the run in ``run_dir`` on this machine, and write the resulting dense checkpoint to ``out``.

    Args:
        name: directory of the window, e.g. ``window_0000990``; None for the newest window that is complete and valid.
        compose: function that composes a configuration from the words of a command line.
        entry: path of the file ``pretrain_moe.py``.
        progress: receives one line for each step, and the output of the job.

    Raises:
        CheckpointError: no window can be used, the job failed, or it saved another state than that of the window.
        ConfigError: ``out`` exists, the disk has too little space, or ``launch`` does not start the run's ranks on this
            machine. In the last case, the message contains the commands to use instead.
        DataError: the configuration of the run cannot be read.
        KeyboardInterrupt: the job was stopped by Ctrl-C or SIGTERM.
        OSError: a file cannot be read or written.
    """
    run_dir, out = run_dir.absolute(), out.absolute()
    check_new(out)
    config, run_id = read_run_config(run_dir), RunId.read(run_dir)
    url = persist_url(config, run_dir)
    found = _find(run_dir, url, name, run_id, progress)
    window = found.first
    where = f"{window_name(found.key)}, iterations {window.start_iteration} to {window.last_iteration}"
    progress(f"{where}, {window.world_size} ranks: complete and verified")
    if found.leaves_out():
        progress(f"{where}: leaves out experts; their newest updates are lost, as in a recovery from this window")
    work = out.parent / f".{out.name}.{os.getpid()}.partial"
    job = _job(config, window, work, run_dir.name, compose([]))
    for line in _differences(config, job):
        progress(f"the window was captured with {line}")
    words = _words(job, compose)
    if config.launch.mode != "local" or config.launch.node_launcher != "local":
        raise ConfigError(_elsewhere(config, run_dir, url, found, words))
    check_space(out.parent, found.dense_bytes(4 if job.precision.params_dtype == "fp32" else 2))
    folder, has_logs = work / run_dir.name, False
    try:
        (folder / "windows").mkdir(parents=True)
        shutil.copyfile(run_dir / RUN_ID_NAME, folder / RUN_ID_NAME)
        _take(open_backend(url), found, folder / "windows", progress)
        progress(f"starting {job.world_size} ranks on {job.launch.num_nodes} nodes of this machine")
        code = _run([sys.executable, str(entry), *words], progress)
        if code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if code != EXIT_OK:
            has_logs = (folder / "logs").exists()
            logs = f"; its logs are in {folder}" if has_logs else ""
            raise CheckpointError(f"{out}: the job that replays the window ended: {EXIT_CODES.get(code, code)}{logs}")
        saved = folder / "checkpoints" / directory_name(window.last_iteration)
        manifest = _verified(saved, window)
        saved.rename(out)
    except BaseException:
        # Keep the logs of a failed job, but no state.
        for path in (folder / "windows", folder / "checkpoints") if has_logs else (work,):
            shutil.rmtree(path, ignore_errors=True)
        raise
    fsync_directory(out.parent)
    shutil.rmtree(work)
    return manifest


def _find(run_dir: Path, url: str, name: str | None, run_id: RunId, progress: Progress) -> _Found:
    folder = WindowFolder(url)
    keys = [key for key in folder.list_windows() if name in (None, window_name(key))]
    if not keys:
        raise CheckpointError(f"{url}: has no {'window' if name is None else name}")
    for key in reversed(keys):
        try:
            return _verify(folder, key, run_id, run_dir)
        except CheckpointError as error:
            if name is not None:
                raise
            progress(f"not used: {error}")
    raise CheckpointError(f"{url}: has no window that can be used")


def _verify(folder: WindowFolder, key: WindowKey, run_id: RunId, run_dir: Path) -> _Found:
    where = folder.describe(key)
    with folder.open(key, 0) as opened:
        window = opened.window
    own = run_id.run_id if window.format_version > 1 else run_dir.name
    if window.run_id != own:
        raise CheckpointError(f"{where}: belongs to another run, {window.run_id}; this run is {own}")
    folder.verify(key, window.world_size)
    windows, files = [], list[tuple[str, str]]()
    for rank in range(window.world_size):
        with folder.open(key, rank) as opened:
            windows.append(opened.window)
            files += [(window_name(each), rank_name(rank)) for each in (key, *opened.earlier)]
    if reason := RejectedWindow.reason_for(run_dir, windows):
        raise CheckpointError(f"{where}: was rejected by an earlier start of the run: {reason}")
    return _Found(key=key, windows=tuple(windows), files=tuple(dict.fromkeys(files)))


def _job(config: JobConfig, window: Window, work: Path, name: str, default: JobConfig) -> JobConfig:
    """Return the configuration of the job that replays ``window``: the run's configuration, but with the values
    that were used when the window was captured. Settings that only further training needs are reset."""
    config = _as_captured(config, window)
    launch, placement, topology = config.launch, config.placement, config.topology
    num_nodes, rest = divmod(window.world_size, launch.ranks_per_node)
    if rest:
        raise CheckpointError(
            f"window of iteration {window.start_iteration}: has {window.world_size} ranks, which cannot be divided "
            f"among nodes of launch.ranks_per_node={launch.ranks_per_node} ranks"
        )
    # After a loss of nodes, a window has fewer ranks than the job had at its start. Their nodes are not known.
    domains = topology.failure_domains[:num_nodes] if num_nodes == launch.num_nodes else []
    replicas = placement.min_replicas if num_nodes == launch.num_nodes else min(placement.min_replicas, num_nodes)
    return replace(
        config,
        launch=replace(launch, num_nodes=num_nodes, master_port=0, forkserver_socket=None),
        nodes=NodesConfig(),
        recovery=RecoveryConfig(),
        topology=replace(topology, failure_domains=domains, failure_domain_source="listed"),
        placement=replace(
            placement,
            min_replicas=replicas,
            state_copies=None,
            rebalance_interval_iterations=None,
            loads_file=None,
            schedule=[],
        ),
        training=replace(
            config.training,
            exit_at_iteration=window.last_iteration,
            eval_interval_iterations=0,
            evaluate_only=False,
            digest_interval_iterations=0,
        ),
        checkpoint=replace(default.checkpoint, async_save=False, fully_parallel=config.checkpoint.fully_parallel),
        snapshot=SnapshotConfig(),
        upstream_log=UpstreamLogConfig(),
        control=default.control if launch.node_launcher == "local" else config.control,
        # Leave out the run's other sinks, too, because they may send messages to people.
        telemetry=replace(default.telemetry, wandb="disabled"),
        testing=TestingConfig(),
        run=replace(default.run, dir=str(work), name=name, resume="must"),
        dry_run=False,
    )


def _as_captured(config: JobConfig, window: Window) -> JobConfig:
    # A later job of the run may have changed these values, but a replay needs the values from the window.
    groups = to_dict(config)
    for key, value in parse_json(window.slices[0].header.get(CONFIG, "{}")).items():
        group, _, name = key.partition(".")
        if name in groups.get(group, {}):
            groups[group][name] = value
    if groups["placement"]["algorithm"] is not None:
        groups["parallel"]["expert_model_parallel_size"] = 1  # derived from the number of ranks
    return from_dict(groups)


def _differences(config: JobConfig, job: JobConfig) -> Iterator[str]:
    before, now = to_dict(config), to_dict(job)
    for group in ("model", "parallel", "optimizer", "precision", "training"):
        for name, value in now[group].items():
            given = before[group][name]
            if value != given and given != "auto" and not name.endswith(("exit_at_iteration", "interval_iterations")):
                yield f"{group}.{name}={value}; config.yaml has {given}"
    if job.world_size != config.world_size:
        yield f"{job.world_size} ranks; config.yaml has {config.world_size}"


def _words(job: JobConfig, compose: Compose) -> list[str]:
    # Always give ``launch.mode``. Otherwise environment variables of a launcher would change its value.
    words = override_words(to_dict(compose([])), to_dict(job), always=("launch.mode",))
    if left := override_words(to_dict(compose(words)), to_dict(job)):
        raise ConfigError(f"{left[0]}: cannot be given on a command line, so the job cannot be started")
    return words


def _elsewhere(config: JobConfig, run_dir: Path, url: str, found: _Found, words: Sequence[str]) -> str:
    """Return the error message for a run whose ranks this command cannot start, with the commands to use instead."""
    launch = config.launch
    key, value = ("node_launcher", launch.node_launcher) if launch.mode == "local" else ("mode", launch.mode)
    folder = run_dir.parent / f"{run_dir.name}-replay"
    work = folder / run_dir.name
    command = [word for word in words if not word.startswith("run.dir=")]
    command += override_words({"run": {"dir": ""}}, {"run": {"dir": str(folder)}})
    directories = sorted({directory for directory, _ in found.files})
    lines = [
        f"mkdir -p {shlex.quote(str(work / 'windows'))}",
        shlex.join(["cp", str(run_dir / RUN_ID_NAME), str(work)]),
        *(shlex.join(["cp", "-r", open_backend(url).describe(name), str(work / "windows")]) for name in directories),
        shlex.join(["python", "pretrain_moe.py", *command]),
    ]
    saved = work / "checkpoints" / directory_name(found.first.last_iteration)
    return (
        f"launch.{key}={value}: must be local, because this command starts ranks only on this machine. Start a job "
        f"as the run was started, with a copy of the window. The job then saves {saved}:\n  " + "\n  ".join(lines)
    )


def _take(backend: Backend, found: _Found, folder: Path, progress: Progress) -> None:
    """Link the files of the window into ``folder``. Copy files that cannot be linked."""
    left = [file for file in found.files if not _link(backend, *file, folder)]
    if not left:
        return
    sources = {}
    try:
        for file in left:
            sources[file] = backend.open(*file)
        num_bytes = sum(source.num_bytes for source in sources.values())
        check_space(folder, num_bytes)
        progress(f"copying {num_bytes:,} bytes of the window")
        for (directory, name), source in sources.items():
            LocalBackend(folder).write(directory, name, _chunks(source))
    finally:
        for source in sources.values():
            source.close()


def _link(backend: Backend, directory: str, name: str, folder: Path) -> bool:
    if not isinstance(backend, LocalBackend):
        return False
    (folder / directory).mkdir(exist_ok=True)
    try:
        # A link is safe: no process writes into a window's file, but only replaces it as a whole.
        os.link(backend.folder / directory / name, folder / directory / name, follow_symlinks=False)
    except OSError:  # another file system, or a file system without links: the caller copies the file
        return False
    return True


def _chunks(source: Any) -> Iterator[bytes]:
    for start in range(0, source.num_bytes, _CHUNK_BYTES):
        chunk = bytearray(min(_CHUNK_BYTES, source.num_bytes - start))
        source.read_into(start, memoryview(chunk))
        yield bytes(chunk)


def _run(command: Sequence[str], progress: Progress) -> int:
    """Run the job, pass its output to ``progress``, and return its exit code. Pass SIGINT and SIGTERM on to the job."""
    process: subprocess.Popen[str] | None = None
    requests: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        requests.append(number)
        if process is not None:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # otherwise Ctrl-C on the terminal would reach the job twice
        )
        if requests:  # a signal came before the process was started
            process.send_signal(requests[0])
        assert process.stdout is not None, "the output of the job is not read"
        is_advice = False
        for line in process.stdout:
            is_advice = is_advice or line.startswith(_ADVICE)
            if line.strip() and not is_advice:
                progress(f"job: {line.rstrip()}")
        code = process.wait()
        # A signal ends the process if it arrives before the process has installed its handlers.
        return EXIT_INTERRUPTED if requests and code < 0 else code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()


def _verified(saved: Path, window: Window) -> Manifest:
    manifest = Manifest.verified(saved)
    found = {"iteration": manifest.iteration, "topology": dict(manifest.topology)}
    wanted = {"iteration": window.last_iteration, "topology": dict(window.topology)}
    if window.format_version > 1:
        found["run_id"], wanted["run_id"] = manifest.run_id, window.run_id
    for key, value in wanted.items():
        if found[key] != value:
            raise CheckpointError(f"{saved}: {key}={found[key]}: must be {value}, as in the window")
    return manifest
