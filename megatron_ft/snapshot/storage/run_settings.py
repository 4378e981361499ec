"""Compares the settings of a job with those of its run's saved state, which are in the manifests."""

from pathlib import Path

from megatron_ft.config.identity import Difference, JobIdentity, Settings
from megatron_ft.errors import CheckpointError
from megatron_ft.serde import parse_json
from megatron_ft.snapshot.storage.checkpoints import list_checkpoints, other_iteration
from megatron_ft.snapshot.storage.manifest import Manifest
from megatron_ft.snapshot.storage.window_folder import WindowFolder
from megatron_ft.snapshot.window import Window

SETTINGS = "settings"
"""Key of a window's settings in the header of its first slice; the value is JSON text."""


def check_same_settings(
    run_dir: Path,
    identity: JobIdentity,
    *,
    windows: WindowFolder | None,
    compares_data: bool,
    allow_other_data: bool,
) -> None:
    """Refuse a job whose settings differ from those of its run's saved state, before any rank starts.

    Only the manifests of the newest checkpoint and of rank 0's part of the newest window are read. If a manifest cannot
    be read, no error is raised here; the ranks verify the files later.

    Args:
        identity: settings of the job.
        windows: the run's persisted windows; None if it has no folder for them.
        compares_data: whether ``identity`` contains the fingerprint of the data.
        allow_other_data: ``checkpoint.allow_other_data``, which applies only to checkpoints.

    Raises:
        CheckpointError: the newest state has other settings; the message names each key with both values.
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
    """Describe the settings in which a checkpoint differs from the job. Return None if there is no difference."""
    if manifest.format_version == 1:  # it has no settings
        return None
    found = _differences(manifest.settings, settings, ignores_data=ignores_data)
    if not found:
        return None
    return (
        f"{path}: was written with other settings than this job has: {'; '.join(map(str, found))}. Resume "
        f"with its settings, or begin another run from its state: run.name=<another> checkpoint.load={path}"
    )


def other_window(window: Window, where: str, settings: Settings, *, ignores_data: bool = False) -> str | None:
    """Describe the settings in which a window differs from the job. Return None if there is no difference.

    Raises:
        CheckpointError: the window has no readable settings.
    """
    if window.format_version == 1:  # it has no settings
        return None
    try:
        found = _differences(parse_json(window.slices[0].header[SETTINGS]), settings, ignores_data=ignores_data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{where}: must contain readable settings of the job: {error!r}") from None
    if not found:
        return None
    return (
        f"{where}: was captured with other settings than this job has: {'; '.join(map(str, found))}. Resume "
        "with its settings, or begin another run"
    )


def _differences(stored: Settings, present: Settings, *, ignores_data: bool) -> list[Difference]:
    return [found for found in Difference.between(stored, present) if not (ignores_data and found.concern == "data")]


def _newest_checkpoint(folder: Path, identity: JobIdentity) -> tuple[Path, Manifest] | None:
    for stored in reversed(list_checkpoints(folder)):
        if not stored.complete:
            continue
        try:
            manifest = Manifest.read(stored.path)
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
