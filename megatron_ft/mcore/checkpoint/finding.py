"""Chooses the checkpoint to load: all ranks verify it together and compare it with the job; damaged ones are
renamed."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from megatron_ft.config.identity import JobIdentity, differences
from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.snapshot.storage import checkpoints
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest, verify
from megatron_ft.snapshot.storage.run_settings import other_checkpoint


class CheckpointFinder:
    """Finds and verifies checkpoints; the ranks share the reading. All methods are collective."""

    def __init__(
        self,
        collectives: Collectives,
        identity: JobIdentity,
        report_damage: Callable[[int, Path, str], None],
        *,
        allow_other_data: bool = False,
    ) -> None:
        """``report_damage`` is called with iteration, directory and reason."""
        self._collectives = collectives
        self._allow_other_data = allow_other_data
        self._identity = identity
        self._report_damage = report_damage
        self._verified: tuple[Path, Manifest] | None = None
        self.foreign: dict[Path, str] = {}
        """Reasons for which ``newest`` has skipped checkpoints, because they belong to other runs or iterations."""
        self._reasons: dict[str, str] = {}
        """Reasons for which this start has renamed checkpoints, by their new names; on rank 0."""

    def newest(self, folder: Path) -> Path | None:
        """Find the newest checkpoint in ``folder`` that verifies and belongs to this run and to the iteration in its
        name.

        Damaged newer ones are reported and renamed; those of other runs and iterations are added to ``foreign``.

        Raises:
            CheckpointError: it was written with other data, or with another model, optimizer or schedule than the job
                has.
        """
        self.foreign = {}
        while True:
            found = [entry.path for entry in checkpoints.list_checkpoints(folder) if entry.complete]
            names = [path.name for path in found if path not in self.foreign]
            # Rank 0's list counts: a shared file system may show ranks different folders for a moment.
            name: str | None = self._collectives.from_first(names[-1] if names else None)
            if name is None:
                return None
            path = folder / name
            try:
                manifest = self.verify(path)
            except CheckpointError as error:
                self._set_aside(path, str(error), "damaged")
                continue
            # Rank 0 compares for all: ranks that differ here would wait for each other forever.
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
        """List the differences between this job and a checkpoint, which may belong to another run; empty for one of
        this job."""
        notes = [self._not_own(directory, manifest)]
        if manifest.format_version == 1:
            notes.append(
                "a checkpoint of format 1 does not record data, model, optimizer and schedule, so these cannot "
                "be compared"
            )
        else:
            notes += map(str, differences(manifest.settings, self._identity.settings))
        return tuple(note for note in notes if note is not None)

    def _not_own(self, path: Path, manifest: Manifest) -> str | None:
        # Return the reason why it is not the checkpoint of this run that its name says; None if it is.
        if checkpoints.is_named(path) and (renamed := checkpoints.other_iteration(path, manifest)) is not None:
            return renamed
        reason = self._identity.not_of_run(
            run_id=manifest.run_id, run_name=manifest.run_name, format_version=manifest.format_version
        )
        return None if reason is None else f"{path}: {reason}"

    def unusable(self, folder: Path) -> tuple[str, ...]:
        """List complete checkpoints of ``folder`` that were damaged and renamed, by this start or an earlier one."""
        reasons = []
        if self._collectives.rank == 0:
            for path in checkpoints.list_set_aside(folder):
                reasons.append(f"{path}: {self._reasons.get(path.name, 'damaged, set aside by an earlier start')}")
        return tuple(self._collectives.from_first(reasons))

    def _set_aside(self, path: Path, reason: str, kind: Literal["damaged", "foreign"]) -> None:
        moved, error = None, None
        if self._collectives.rank == 0:
            try:
                moved = checkpoints.set_aside(path, kind)
            except OSError as failure:
                error = f"{path}: {kind} ({reason}), but cannot be renamed: {failure}"
        error = self._collectives.errors(error)
        if error is not None:
            raise CheckpointError(error)
        if moved is not None:
            self._reasons[moved.name] = reason
            self._report_damage(checkpoints.iteration_of(path), path, f"{kind}, renamed to {moved.name}: {reason}")

    def verify(self, directory: Path) -> Manifest:
        """Check all files of ``directory``; the ranks share the reading.

        Raises CheckpointError on every rank when one of them finds damage.
        """
        manifest: Manifest | None = None
        error: str | None = None
        try:
            manifest = verify(directory, part=self._collectives.rank, num_parts=self._collectives.num_ranks)
        except CheckpointError as failure:
            error = str(failure)
        everywhere = self._collectives.errors(error)
        if everywhere is not None:
            raise CheckpointError(everywhere if error is None else error)
        assert manifest is not None, "there is neither a manifest nor an error"
        self._verified = (directory, manifest)
        return manifest

    def check(self, directory: Path, *, trust: bool) -> Manifest | None:
        """Read the manifest of ``directory``, whose files are verified first or have just been; None if it has none and
        is trusted.

        Raises CheckpointError when it is damaged, or has no manifest and is not trusted.
        """
        if not directory.is_dir():
            raise CheckpointError(f"checkpoint.load={directory}: must be an existing directory")
        if not (directory / MANIFEST_NAME).exists():
            if trust:
                return None
            raise CheckpointError(
                f"{directory}: has no {MANIFEST_NAME} of this project, so its pickle files cannot be verified; "
                "set checkpoint.trust=true only if you trust its origin"
            )
        # Good for one load: the files may change afterwards.
        verified, self._verified = self._verified, None
        if verified is not None and verified[0] == directory:
            return verified[1]
        return self.verify(directory)
