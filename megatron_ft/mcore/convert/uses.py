"""Answers which recovery strategies and configuration keys can use a checkpoint, a window or a Hugging Face folder.

Files are verified first. Answers about strategies are for the next job of one run: a given run, or else the run whose
folder contains the checkpoint or window. Without a run, only the manifest and the metadata are checked.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ft.config.identity import JobIdentity, settings_of
from megatron_ft.config.job import JobConfig
from megatron_ft.config.membership import JobInputs, derive_placement
from megatron_ft.config.validate import on_device
from megatron_ft.control.rundir import CONFIG_NAME, RunId, read_run_config
from megatron_ft.corpus.samples import resolve_vocab_size
from megatron_ft.errors import CheckpointError, ConfigError, DataError
from megatron_ft.mcore.checkpoint.metadata import OPTIMIZER
from megatron_ft.mcore.checkpoint.state import layout_of
from megatron_ft.mcore.convert.dense_files import WEIGHTS_ONLY, DenseReader
from megatron_ft.mcore.convert.folder import CONFIG
from megatron_ft.mcore.convert.inspection import DenseSource, FolderSource, Source, WindowSource, is_window, open_source
from megatron_ft.mcore.convert.model_tensors import check_tensors
from megatron_ft.planning.placement.stage import StageRequest, first_plans
from megatron_ft.planning.recovery.facts import RecoveryFacts
from megatron_ft.planning.recovery.uses import SavedState, Use, uses_by_strategies
from megatron_ft.planning.snapshot.report import SnapshotReport
from megatron_ft.snapshot.storage.checkpoints import is_named, other_iteration
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME
from megatron_ft.snapshot.storage.run_settings import check_source, other_checkpoint, other_window
from megatron_ft.snapshot.storage.window_folder import RejectedWindow
from megatron_ft.snapshot.window import Window

_OF_OTHERS = "has no manifest of this project: a run continues only from checkpoints and windows that it saved itself"
_FOLDER = "a Hugging Face folder"
_KEYS = ("checkpoint.load", "checkpoint.load_weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Uses:
    """Answers to the question which strategies and keys can use a checkpoint, window or Hugging Face folder."""

    title: str
    """Description of the checkpoint, window or folder in one line."""
    uses: tuple[Use, ...]
    damage: str | None = None
    """Error of the verification; None if all files are intact."""
    notes: tuple[str, ...] = ()

    def render(self) -> str:
        """Format the answers as text, one line each."""
        width = max(len(use.name) for use in self.uses)
        lines = [f"{use.name:{width}}  {'yes' if use.is_possible else 'no ':3}  {use.reason}" for use in self.uses]
        return "\n".join([self.title, *lines, *(f"note: {note}" for note in self.notes)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Next job of a run: the job that would load the checkpoint or window."""

    run_dir: Path
    facts: RecoveryFacts
    identity: JobIdentity
    notes: tuple[str, ...]


def find_uses(path: Path, *, trust: bool = False, run_dir: Path | None = None) -> Uses:
    """Verify a saved state or Hugging Face folder, and find the recovery strategies and keys that can use it.

    Args:
        trust: whether a checkpoint without a manifest may be read; its metadata is a pickle, which can run code.
        run_dir: run whose next job would load it; None for the run whose folder contains ``path``, if any.

    Raises:
        CheckpointError: the path is none of these.
        DataError: ``run_dir`` has no configuration.
    """
    path = path.absolute()
    job = _job_of(path, run_dir)
    notes = () if job is None else job.notes
    try:
        source = open_source(path, trust=trust, with_optimizer=True)
    except CheckpointError as error:
        if (state := _state_by_name(path)) is None:
            raise
        damaged = replace(state, defect=f"damaged: {error}")
        uses = (*uses_by_strategies(damaged), *(_no(key, _not_dense(damaged) or damaged.defect) for key in _KEYS))
        return Uses(title=f"{path}: {state.what}", uses=uses, damage=str(error), notes=notes)
    state = _state_of(source, job)
    uses = (
        *uses_by_strategies(state, None if job is None else job.facts),
        *(_use_of_key(key, source, state, job) for key in _KEYS),
    )
    return Uses(title=source.title, uses=uses, notes=notes)


def _job_of(path: Path, run_dir: Path | None) -> _Job | None:
    found = path.parent.parent if run_dir is None else run_dir
    if run_dir is None and not (found / CONFIG_NAME).is_file():
        return None
    config, notes = derive_placement(read_run_config(found)), list[str]()
    if config.training.device == "auto":
        config = on_device(config, "cpu")
        notes.append("training.device=auto: no rank has reported its device yet, so these answers are for cpu")
    try:
        vocab_size = resolve_vocab_size(config)
        settings = settings_of(config, data_fingerprint="", vocab_size=vocab_size)
    except (DataError, ConfigError) as error:
        settings = {}
        notes.append(f"settings were not compared with those of the run, because its tokenizer cannot be read: {error}")
    return _Job(
        run_dir=found,
        facts=_facts_of(config),
        identity=_identity_of(found, settings),
        notes=(f"answers are for the next job of the run {found}", *notes),
    )


def _facts_of(config: JobConfig) -> RecoveryFacts:
    plans = []
    if config.placement.algorithm is not None:
        plans = first_plans(config, StageRequest.of_job(config), JobInputs.read(config))
    # No answer depends on the size of the vocabulary.
    return RecoveryFacts.of(config, plans, SnapshotReport.of(config, config.model.vocab_size or 1))


def _identity_of(run_dir: Path, settings: Any) -> JobIdentity:
    known = RunId.read(run_dir)
    return JobIdentity(
        run_id=known.run_id, run_name=run_dir.absolute().name, settings=settings, takes_format_1=known.is_older
    )


def _state_by_name(path: Path) -> SavedState | None:
    """Return the kind of saved state in ``path``, judged only by file names; None if it is not a known kind."""
    if (path / CONFIG).is_file() and not (path / MANIFEST_NAME).exists():
        return SavedState(kind=None, what=_FOLDER)
    if is_window(path):
        return SavedState(kind="persisted", what="a window on storage")
    if path.is_dir() and (path / MANIFEST_NAME).exists():
        return SavedState(kind="checkpoint", what="a dense checkpoint")
    return None


def _state_of(source: Source, job: _Job | None) -> SavedState:
    if isinstance(source, WindowSource):
        window = source.windows[0]
        return SavedState(
            kind="persisted",
            what="a window on storage",
            iteration=window.last_iteration,
            start_iteration=window.start_iteration,
            num_ranks=window.world_size,
            loses_updates=source.leaves_out_experts,
            defect="" if job is None else _defect_of_window(source, job),
        )
    if isinstance(source, FolderSource):
        return SavedState(kind=None, what=_FOLDER)
    assert isinstance(source, DenseSource), f"{type(source).__name__} is no kind of saved state"
    reader = source.reader
    iteration = 0 if reader.manifest is None else reader.manifest.iteration
    return SavedState(
        kind="checkpoint", what="a dense checkpoint", iteration=iteration, defect=_defect_of_checkpoint(reader, job)
    )


def _defect_of_window(source: WindowSource, job: _Job) -> str:
    window: Window = source.windows[0]
    about = {"run_id": window.run_id, "run_name": "of another name", "format_version": window.format_version}
    if reason := job.identity.not_of_run(**about):  # type: ignore[arg-type]
        return reason
    try:
        found = other_window(window, str(source.path), job.identity.settings, ignores_data=True)
    except CheckpointError as error:  # it has no readable settings
        return str(error)
    if job.identity.settings and found:
        return found
    if reason := RejectedWindow.reason_for(job.run_dir, source.windows):
        return f"was rejected by an earlier start of the run: {reason}"
    return ""


def _defect_of_checkpoint(reader: DenseReader, job: _Job | None) -> str:
    manifest = reader.manifest
    if manifest is None:
        return _OF_OTHERS
    if WEIGHTS_ONLY in manifest.settings or not any(name.startswith(OPTIMIZER) for name in reader.tensors):
        return "contains only weights, without optimizer state"
    if is_named(reader.directory) and (reason := other_iteration(reader.directory, manifest)):
        return reason
    if job is None:
        return ""
    about = {"run_id": manifest.run_id, "run_name": manifest.run_name, "format_version": manifest.format_version}
    if reason := job.identity.not_of_run(**about):  # type: ignore[arg-type]
        return f"{reason}; another run can start from it with checkpoint.load"
    if not job.identity.settings:
        return ""
    return other_checkpoint(reader.directory, manifest, job.identity.settings, ignores_data=True) or ""


def _use_of_key(key: str, source: Source, state: SavedState, job: _Job | None) -> Use:
    """Return whether a new run can load ``source`` with ``key``, e.g. ``checkpoint.load``. Make the same checks as the
    launcher and the ranks of such a run."""
    if reason := _not_dense(state):
        return _no(key, reason)
    assert isinstance(source, DenseSource), f"{type(source).__name__} cannot be loaded"
    reader, weights_only = source.reader, key == "checkpoint.load_weights"
    try:
        if reader.manifest is None:
            layout_of(reader.directory, weights_only=weights_only)
        else:
            settings = reader.manifest.settings if job is None or not job.identity.settings else job.identity.settings
            check_source(reader.directory, settings, weights_only=weights_only, trust=False)
            if reader.manifest.settings.get("model"):
                check_tensors(reader.weights, reader.model(), f"{key}={reader.directory}")
    except CheckpointError as error:
        return _no(key, str(error).removeprefix(f"{key}={reader.directory}: "))
    what = "only the weights" if weights_only else "weights and optimizer state"
    trust = ", with checkpoint.trust=true" if reader.manifest is None else ""
    return Use(name=key, is_possible=True, reason=f"a new run starts with {what} of it{trust}")


def _not_dense(state: SavedState) -> str:
    if state.kind == "checkpoint":
        return ""
    command = "from-hf" if state.kind is None else "from-window"
    return (
        f"loads dense checkpoints, and this is {state.what}; convert_checkpoint {command} writes a checkpoint from it"
    )


def _no(name: str, reason: str) -> Use:
    return Use(name=name, is_possible=False, reason=reason)
