"""Which checkpoint can be loaded: verified by all ranks together, damage named and set aside."""

from collections.abc import Callable
from pathlib import Path

from megatron_ft.errors import CheckpointError
from megatron_ft.mcore.checkpoint.agreement import Agreement
from megatron_ft.runtime.storage import checkpoints
from megatron_ft.runtime.storage.manifest import MANIFEST_NAME, Manifest, verify


class CheckpointFinder:
    """Looks for checkpoints and verifies them, the reading shared by the ranks. All methods are collective."""

    def __init__(self, agreement: Agreement, report_damage: Callable[[int, Path, str], None]) -> None:
        """``report_damage`` gets iteration, directory and reason."""
        self._agreement = agreement
        self._report_damage = report_damage
        self._verified: tuple[Path, Manifest] | None = None

    def newest(self, folder: Path) -> Path | None:
        """The newest checkpoint in ``folder`` that verifies; damaged newer ones are reported and set aside."""
        while True:
            names = [entry.path.name for entry in checkpoints.list_checkpoints(folder) if entry.complete]
            name: str | None = self._agreement.from_first(names[-1] if names else None)
            if name is None:
                return None
            try:
                self.verify(folder / name)
            except CheckpointError as error:
                self._set_aside(folder / name, str(error))
                continue
            return folder / name

    def _set_aside(self, path: Path, reason: str) -> None:
        moved, error = None, None
        if self._agreement.rank == 0:
            try:
                moved = checkpoints.set_aside(path)
            except OSError as failure:
                error = f"{path}: damaged ({reason}) and cannot be set aside: {failure}"
        error = self._agreement.errors(error)
        if error is not None:
            raise CheckpointError(error)
        if moved is not None:
            self._report_damage(checkpoints.iteration_of(path), path, f"damaged, set aside as {moved.name}: {reason}")

    def verify(self, directory: Path) -> Manifest:
        """Check all files of ``directory``, the reading shared by the ranks.

        Raises CheckpointError on every rank when one of them finds damage.
        """
        manifest: Manifest | None = None
        error: str | None = None
        try:
            manifest = verify(directory, part=self._agreement.rank, num_parts=self._agreement.num_ranks)
        except CheckpointError as failure:
            error = str(failure)
        everywhere = self._agreement.errors(error)
        if everywhere is not None:
            raise CheckpointError(everywhere if error is None else error)
        assert manifest is not None, "a manifest without an error"
        self._verified = (directory, manifest)
        return manifest

    def check(self, directory: Path, *, trust: bool) -> Manifest | None:
        """The manifest of ``directory``, whose files verify now or have just been verified; None if trusted without.

        Raises CheckpointError when it is damaged, or has no manifest and is not trusted.
        """
        if not directory.is_dir():
            raise CheckpointError(f"checkpoint.load={directory}: not a directory")
        if not (directory / MANIFEST_NAME).exists():
            if trust:
                return None
            raise CheckpointError(
                f"{directory}: no {MANIFEST_NAME} of this project, so nothing vouches for its pickle files; "
                "set checkpoint.trust=true only if you know who wrote it"
            )
        verified, self._verified = self._verified, None
        if verified is not None and verified[0] == directory:
            return verified[1]
        return self.verify(directory)
