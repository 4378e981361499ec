"""Compares the settings of a job with those that its run's saved state was written with, by manifests alone."""

from pathlib import Path

from megatron_ft.config.identity import Difference, JobIdentity, Settings, differences
from megatron_ft.errors import CheckpointError
from megatron_ft.snapshot.storage.checkpoints import list_checkpoints, other_iteration
from megatron_ft.snapshot.storage.manifest import Manifest, read_manifest
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.snapshot.window import Window
from megatron_ft.strict_json import parse_json

SETTINGS = "settings"
"""Entry of the header of a window's first slice: the settings it was captured with, as JSON text."""


def check_same_settings(
    run_dir: Path,
    identity: JobIdentity,
    *,
    windows: WindowFolder | None,
    compares_data: bool,
    allow_other_data: bool,
) -> None:
    """Refuse a job that the ranks would refuse for its settings, before any of them starts.

    Reads the manifest of the run's newest checkpoint and of rank 0's part of its newest window; what cannot be read is
    left to the ranks, which also verify the content.

    Args:
        windows: the run's persisted windows; None where it has none.
        compares_data: whether ``identity`` knows the samples.
        allow_other_data: ``checkpoint.allow_other_data``, which counts for checkpoints alone.

    Raises:
        CheckpointError: the newest state has other settings; names each key with both values.
    """
    checkpoint = _newest_checkpoint(run_dir / "checkpoints", identity)
    if checkpoint is not None:
        ignores_data = allow_other_data or not compares_data
        error = other_checkpoint(*checkpoint, identity.settings, ignores_data=ignores_data)
        if error is not None:
            raise CheckpointError(error)
    window = None if windows is None else _newest_window(windows, identity)
    # An older window is not used, whatever its settings are.
    if window is not None and (checkpoint is None or window[0].last_iteration > checkpoint[1].iteration):
        error = other_window(*window, identity.settings, ignores_data=not compares_data)
        if error is not None:
            raise CheckpointError(error)


def other_checkpoint(path: Path, manifest: Manifest, settings: Settings, *, ignores_data: bool) -> str | None:
    """Describe the other settings of a checkpoint of this run; None where they are the same."""
    if manifest.format_version == 1:  # it has no settings
        return None
    found = _differences(manifest.settings, settings, ignores_data=ignores_data)
    if not found:
        return None
    return (
        f"{path}: was written with other settings than this job has: {'; '.join(map(str, found))}. Give the run "
        f"its own settings, or begin another run from its state: run.name=<another> checkpoint.load={path}"
    )


def other_window(window: Window, where: str, settings: Settings, *, ignores_data: bool = False) -> str | None:
    """Describe the other settings of a window of this run; None where they are the same.

    Raises:
        CheckpointError: it does not say them.
    """
    if window.format_version == 1:  # it has no settings
        return None
    try:
        found = _differences(parse_json(window.slices[0].header[SETTINGS]), settings, ignores_data=ignores_data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where}: must contain readable settings of its job: {error!r}") from None
    if not found:
        return None
    return (
        f"{where}: was captured with other settings than this job has: {'; '.join(map(str, found))}. Give the run "
        "its own settings, or begin another one"
    )


def _differences(stored: Settings, present: Settings, *, ignores_data: bool) -> list[Difference]:
    return [found for found in differences(stored, present) if not (ignores_data and found.concern == "data")]


def _newest_checkpoint(folder: Path, identity: JobIdentity) -> tuple[Path, Manifest] | None:
    for stored in reversed(list_checkpoints(folder)):
        if not stored.complete:
            continue
        try:
            manifest = read_manifest(stored.path)
        except CheckpointError:
            continue
        run_id, run_name, version = manifest.run_id, manifest.run_name, manifest.format_version
        is_own = identity.not_of_run(run_id=run_id, run_name=run_name, format_version=version) is None
        if is_own and other_iteration(stored.path, manifest) is None:
            return stored.path, manifest
    return None


def _newest_window(folder: WindowFolder, identity: JobIdentity) -> tuple[Window, str] | None:
    for stored in reversed(folder.list_windows()):
        try:
            with folder.open(stored, 0) as opened:
                window, where = opened.window, opened.path
            other_window(window, where, identity.settings)
        except CheckpointError:
            continue
        if identity.not_of_run(run_id=window.run_id, run_name="", format_version=window.format_version) is None:
            return window, where
    return None
