"""Finds the checkpoint to load. All ranks verify it together; damaged checkpoints are renamed."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from megatron_ft.config.identity import Difference, JobIdentity
from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.snapshot.storage import checkpoints
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest
from megatron_ft.snapshot.storage.run_settings import other_checkpoint


class CheckpointFinder:
    """Finds and verifies checkpoints. Each rank reads a part of the files. All ranks must call the same methods."""

    def __init__(
        self,
        collectives: Collectives,
        identity: JobIdentity,
        report_damage: Callable[[int, Path, str], None],
        *,
        allow_other_data: bool = False,
    ) -> None:
        """Create a finder. ``report_damage`` is called with iteration, directory and reason of each renamed
        checkpoint."""
        self._collectives = collectives
        self._allow_other_data = allow_other_data
        self._identity = identity
        self._report_damage = report_damage
        self._verified: tuple[Path, Manifest] | None = None
        self.foreign: dict[Path, str] = {}
        """Checkpoints of other runs or iterations that ``newest`` has skipped, with the reasons."""
        self._reasons: dict[str, str] = {}
        """Why this start has renamed checkpoints, by their new names; only on rank 0."""

    def newest(self, folder: Path) -> Path | None:
        """Return the newest undamaged checkpoint of this run in ``folder``; None if there is none.

        Newer checkpoints that are damaged are reported and renamed. Newer checkpoints of other runs, or with a manifest
        for another iteration than their name, are added to ``foreign``.

        Raises:
            CheckpointError: this checkpoint was written with other data, or another model, optimizer or schedule, than
                this job has.
        """
        self.foreign = {}
        while True:
            found = [entry.path for entry in checkpoints.list_checkpoints(folder) if entry.complete]
            names = [path.name for path in found if path not in self.foreign]
            # All ranks use the list of rank 0, because a shared file system may briefly show them different contents.
            name: str | None = self._collectives.from_first(names[-1] if names else None)
            if name is None:
                return None
            path = folder / name
            try:
                manifest = self.verify(path)
            except CheckpointError as error:
                self._set_aside(path, str(error), "damaged")
                continue
            # Only rank 0 compares. If ranks came to different results, they would wait for each other forever.
            settings, ignores_data = self._identity.settings, self._allow_other_data
            other = other_checkpoint(path, manifest, settings, ignores_data=ignores_data)
            reason, error = self._collectives.from_first([self._not_own(path, manifest), other])
            if reason is not None:
                self.foreign[path] = reason
                continue
            if error is not None:
                raise CheckpointError(error)
            return path

    def set_foreign_aside(self) -> None:
        """Rename the checkpoints in ``foreign``, because saving and deleting depend on the names of checkpoints."""
        for path, reason in self.foreign.items():
            self._set_aside(path, reason, "foreign")
        self.foreign = {}

    def differences(self, directory: Path, manifest: Manifest) -> tuple[str, ...]:
        """List the differences between this job and the checkpoint in ``directory``, which may be of another run."""
        notes = [self._not_own(directory, manifest)]
        if manifest.format_version == 1:
            notes.append(
                "the checkpoint has format 1, which does not record data, model, optimizer and schedule, so these "
                "cannot be compared"
            )
        else:
            notes += map(str, Difference.between(manifest.settings, self._identity.settings))
        return tuple(note for note in notes if note is not None)

    def _not_own(self, path: Path, manifest: Manifest) -> str | None:
        # Returns why the checkpoint is of another iteration than its name, or of another run; None if it is not.
        if checkpoints.is_named(path) and (renamed := checkpoints.other_iteration(path, manifest)) is not None:
            return renamed
        reason = self._identity.not_of_run(
            run_id=manifest.run_id, run_name=manifest.run_name, format_version=manifest.format_version
        )
        return None if reason is None else f"{path}: {reason}"

    def unusable(self, folder: Path) -> tuple[str, ...]:
        """List the checkpoints in ``folder`` that were renamed because they were damaged, each with the reason."""
        reasons = []
        if self._collectives.rank == 0:
            for path in checkpoints.list_set_aside(folder):
                reasons.append(f"{path}: {self._reasons.get(path.name, 'damaged, renamed by an earlier start')}")
        return tuple(self._collectives.from_first(reasons))

    def _set_aside(self, path: Path, reason: str, kind: Literal["damaged", "foreign"]) -> None:
        moved, error = None, None
        if self._collectives.rank == 0:
            try:
                moved = checkpoints.set_aside(path, kind)
            except OSError as failure:
                error = f"{path} is {kind} ({reason}), but cannot be renamed: {failure}"
        error = self._collectives.errors(error)
        if error is not None:
            raise CheckpointError(error)
        if moved is not None:
            self._reasons[moved.name] = reason
            self._report_damage(checkpoints.iteration_of(path), path, f"{kind}, renamed to {moved.name}: {reason}")

    def verify(self, directory: Path) -> Manifest:
        """Verify all files of ``directory``. Each rank reads a part of them. Raises CheckpointError on every rank if
        any rank finds damage."""
        manifest: Manifest | None = None
        error: str | None = None
        try:
            manifest = Manifest.verified(directory, part=self._collectives.rank, num_parts=self._collectives.num_ranks)
        except CheckpointError as failure:
            error = str(failure)
        everywhere = self._collectives.errors(error)
        if everywhere is not None:
            raise CheckpointError(everywhere if error is None else error)
        assert manifest is not None, "there is neither a manifest nor an error"
        self._verified = (directory, manifest)
        return manifest

    def check(self, directory: Path, *, trust: bool) -> Manifest | None:
        """Verify ``directory``, unless the preceding call has verified it, and return its manifest. If there is no
        manifest, return None if ``trust`` is true. Raises CheckpointError when files are damaged, or there is no
        manifest and ``trust`` is false."""
        if not directory.is_dir():
            raise CheckpointError(f"checkpoint.load={directory}: must be an existing directory")
        if not (directory / MANIFEST_NAME).exists():
            if trust:
                return None
            raise CheckpointError(
                f"{directory} has no {MANIFEST_NAME} of this project, so its pickle files, which can run code, cannot "
                "be verified; set checkpoint.trust=true only if you trust the origin of this checkpoint"
            )
        # An earlier verification counts only once, because the files may change later.
        verified, self._verified = self._verified, None
        if verified is not None and verified[0] == directory:
            return verified[1]
        return self.verify(directory)
