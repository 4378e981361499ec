"""Chooses the checkpoint to load: verified by all ranks together and compared with the job; damaged ones are named and
set aside."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from megatron_ft.config.identity import JobIdentity, differences
from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.collectives import Collectives
from megatron_ft.snapshot.storage import checkpoints
from megatron_ft.snapshot.storage.manifest import MANIFEST_NAME, Manifest, verify


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
        """``report_damage`` gets iteration, directory and reason."""
        self._collectives = collectives
        self._allow_other_data = allow_other_data
        self._identity = identity
        self._report_damage = report_damage
        self._verified: tuple[Path, Manifest] | None = None
        self.foreign: dict[Path, str] = {}
        """Checkpoints of other runs that ``newest`` has skipped, each with the reason."""
        self._reasons: dict[str, str] = {}
        """Checkpoints that this start has set aside, by their new names; on rank 0."""

    def newest(self, folder: Path) -> Path | None:
        """The newest checkpoint in ``folder`` that verifies and is of this run and of the iteration in its name.

        Damaged newer ones are reported and set aside; those of other runs and iterations are put into ``foreign``.

        Raises:
            CheckpointError: it was written with other data, another model, optimizer or schedule than the job has.
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
            reason, error = self._collectives.from_first([self._not_own(path, manifest), self._other(path, manifest)])
            if reason is not None:
                self.foreign[path] = reason
                continue
            if error is not None:
                raise CheckpointError(error)
            return path

    def set_foreign_aside(self) -> None:
        """Rename the checkpoints in ``foreign``: saving and deleting go by the names of checkpoints."""
        for path, reason in self.foreign.items():
            self._set_aside(path, reason, "foreign")
        self.foreign = {}

    def differences(self, directory: Path, manifest: Manifest) -> tuple[str, ...]:
        """List the differences between a checkpoint, which may be of another run, and this job; empty for one of its
        own."""
        notes = [self._not_own(directory, manifest)]
        if manifest.format_version == 1:
            notes.append("format 1 does not record data, model, optimizer and schedule: they cannot be compared")
        else:
            notes += map(str, differences(manifest.settings, self._identity.settings))
        return tuple(note for note in notes if note is not None)

    def _not_own(self, path: Path, manifest: Manifest) -> str | None:
        """Explain why it is not the checkpoint of this run that its name says; None where it is."""
        if checkpoints.is_named(path) and (renamed := checkpoints.other_iteration(path, manifest)) is not None:
            return renamed
        reason = self._identity.not_of_run(
            run_id=manifest.run_id, run_name=manifest.run_name, format_version=manifest.format_version
        )
        return None if reason is None else f"{path}: {reason}"

    def _other(self, path: Path, manifest: Manifest) -> str | None:
        """Describe the other settings of a checkpoint of this run; None where they are the same."""
        if manifest.format_version == 1:
            return None
        found = differences(manifest.settings, self._identity.settings)
        if self._allow_other_data:
            found = [difference for difference in found if difference.concern != "data"]
        if not found:
            return None
        return (
            f"{path}: was written with other settings than this job has: {'; '.join(map(str, found))}. Give the run "
            f"its own settings, or begin another run from its state: run.name=<another> checkpoint.load={path}"
        )

    def unusable(self, folder: Path) -> tuple[str, ...]:
        """List complete checkpoints of ``folder`` that were damaged and set aside, by this start or an earlier one."""
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
                error = f"{path}: {kind} ({reason}) and cannot be set aside: {failure}"
        error = self._collectives.errors(error)
        if error is not None:
            raise CheckpointError(error)
        if moved is not None:
            self._reasons[moved.name] = reason
            self._report_damage(checkpoints.iteration_of(path), path, f"{kind}, set aside as {moved.name}: {reason}")

    def verify(self, directory: Path) -> Manifest:
        """Check all files of ``directory``, the reading shared by the ranks.

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
        assert manifest is not None, "a manifest without an error"
        self._verified = (directory, manifest)
        return manifest

    def check(self, directory: Path, *, trust: bool) -> Manifest | None:
        """Read the manifest of ``directory``, whose files verify now or have just been verified; None if trusted
        without.

        Raises CheckpointError when it is damaged, or has no manifest and is not trusted.
        """
        if not directory.is_dir():
            raise CheckpointError(f"checkpoint.load={directory}: not a directory")
        if not (directory / MANIFEST_NAME).exists():
            if trust:
                return None
            raise CheckpointError(
                f"{directory}: no {MANIFEST_NAME} of this project, so its pickle files cannot be verified; "
                "set checkpoint.trust=true only if you know who wrote it"
            )
        # Good for one load: the files may change afterwards.
        verified, self._verified = self._verified, None
        if verified is not None and verified[0] == directory:
            return verified[1]
        return self.verify(directory)
