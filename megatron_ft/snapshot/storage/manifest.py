"""Manifest of a checkpoint: the list of the checkpoint's files with their checksums. It is written after all files.

A directory with a readable manifest is a complete checkpoint. The manifest is JSON and contains a checksum of itself.
The sizes and checksums of all files are verified before any other code opens the files. This is necessary because data
files contain pickle, and loading pickle from unverified bytes is not safe.
"""

import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from megatron_ft.config.identity import Settings
from megatron_ft.errors import CheckpointError, UnreadableError
from megatron_ft.serde import decode
from megatron_ft.snapshot.storage.files import FileEntry, hash_file, write_atomically

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 2
MAX_MANIFEST_BYTES = 64 << 20
"""Largest size of a manifest in bytes. A larger manifest is not read."""

_NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of a manifest: the run and iteration of a checkpoint, and its files with their checksums."""

    run_id: str
    """Random id of the run that wrote the checkpoint. In format version 1, it is the name of the run's folder."""
    run_name: str
    """Name of the folder of the run that wrote the checkpoint."""
    generation: int
    """Number of the membership (generation) whose ranks wrote the checkpoint."""
    topology: dict[str, int]
    """Sizes of the parallel groups of the job that wrote the checkpoint, and its ``world_size``."""
    iteration: int
    """Last iteration whose update the checkpoint contains."""
    consumed_samples: int
    """Number of samples that training has consumed, including those of ``iteration``."""
    settings: Settings
    """Settings of the run, as [group][key]; groups are data, model, optimizer, schedule. Empty in format version 1."""
    software: dict[str, str]
    """Versions of the software that wrote the checkpoint."""
    files: tuple[FileEntry, ...]
    """All files of the checkpoint except the manifest itself."""
    format_version: int = field(default=FORMAT_VERSION)
    """Version of the manifest's format."""

    def validate(self) -> None:
        """Raise CheckpointError if a name, a size or a checksum in the manifest is invalid."""
        seen: set[str] = set()
        for entry in self.files:
            _check_name(entry.name)
            if entry.name in seen or entry.name == MANIFEST_NAME:
                raise CheckpointError(f"manifest lists {entry.name!r}: must list each file only once, and not itself")
            seen.add(entry.name)
            if entry.num_bytes < 0 or not _HASH.fullmatch(entry.xxh3_128):
                raise CheckpointError(f"manifest entry of {entry.name!r} has an invalid size or checksum")
        if self.iteration < 0 or self.consumed_samples < 0 or self.generation < 0:
            raise CheckpointError("manifest has a negative iteration, sample count or generation")

    def summary(self) -> str:
        """Describe the checkpoint in one line."""
        total = sum(entry.num_bytes for entry in self.files)
        return (
            f"iteration {self.iteration}, {len(self.files)} files, {total} bytes, "
            f"run {self.run_name}, written by {self.topology.get('world_size', '?')} ranks"
        )

    def to_bytes(self) -> bytes:
        """Convert the manifest to JSON. The field ``manifest_xxh3_128`` is the checksum of all other fields."""
        body = asdict(self)
        body["manifest_xxh3_128"] = _body_checksum(body)
        return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Manifest":
        """Create a manifest from the result of ``to_bytes``. Raises CheckpointError for any other content."""
        body = parse_object(content)
        claimed = body.pop("manifest_xxh3_128", None)
        version = body.get("format_version")
        # Check the version before the checksum, because a newer format may compute the checksum in another way.
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise CheckpointError(
                f"manifest format_version={version!r}: must be from 1 to {FORMAT_VERSION} for this version of the "
                "project"
            )
        if claimed != _body_checksum(body):
            raise CheckpointError("manifest is damaged: it does not match its own checksum")
        manifest = _parse(body)
        manifest.validate()
        return manifest

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read the manifest in ``directory``. If it cannot be read, raise a CheckpointError with its path."""
        path = directory / MANIFEST_NAME
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path}: must be a regular file")
            # Check the size before the file is read into memory.
            if status.st_size > MAX_MANIFEST_BYTES:
                raise CheckpointError(f"{path}: {status.st_size} bytes: must be at most {MAX_MANIFEST_BYTES}")
            return Manifest.from_bytes(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(
                f"{directory}: has no {MANIFEST_NAME}; the checkpoint is incomplete, or was not written by this project"
            ) from None
        except OSError as error:
            raise _unread(path, error) from error
        except CheckpointError as error:
            message = str(error)
            raise CheckpointError(message if message.startswith(str(path)) else f"{path}: {message}") from None

    @classmethod
    def verified(cls, directory: Path, *, part: int = 0, num_parts: int = 1, known: Collection[str] = ()) -> "Manifest":
        """Compare the files of a checkpoint with its manifest, and return the manifest.

        Every caller checks the names and sizes of all files. Ranks can share the reading: a caller reads only every
        ``num_parts``-th file in the order of size, beginning with file ``part``, and verifies its checksum. Files in
        ``known`` are not read, because the caller has verified their checksums itself.

        Raises:
            CheckpointError: a file is missing, unlisted, not a regular file, or has other content; the message names
                this file. It is an UnreadableError if the storage could not read an existing file.
        """
        manifest = Manifest.read(directory)
        _check_listing(directory, manifest.files)
        # Sort by size, so that ranks that each read every ``num_parts``-th file read about as many bytes.
        by_size = sorted(manifest.files, key=lambda entry: (-entry.num_bytes, entry.name))
        for entry in by_size[part::num_parts]:
            if entry.name not in known:
                _check_content(directory, entry)
        return manifest

    def write(self, directory: Path) -> None:
        """Write and sync the manifest, which completes the checkpoint in ``directory``."""
        self.validate()
        write_atomically(directory, MANIFEST_NAME, self.to_bytes())


def parse_object(content: bytes) -> dict[str, Any]:
    """Parse a JSON object in UTF-8. Raises CheckpointError if it is invalid, or has a repeated key, NaN or infinity."""
    try:
        body = json.loads(content.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"manifest is damaged: it is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise CheckpointError("manifest is damaged: it is not a JSON object")
    return body


def _check_name(name: str) -> None:
    """Raise CheckpointError if ``name`` is not a relative path inside the checkpoint directory."""
    if len(name) > 255 or not _NAME.fullmatch(name) or any(set(part) == {"."} for part in name.split("/")):
        raise CheckpointError(
            f"file name {name!r:.200}: must be a relative path of 1 to 255 characters, whose names between '/' "
            "consist of A-Z, a-z, 0-9, '.', '_' and '-', and not only of '.'"
        )


def _check_listing(directory: Path, files: Sequence[FileEntry]) -> None:
    present = dict(_walk(directory))
    present.pop(MANIFEST_NAME, None)
    for entry in files:
        if entry.name not in present:
            raise CheckpointError(f"{directory / entry.name}: is missing, but the manifest lists it")
        if present[entry.name] != entry.num_bytes:
            raise CheckpointError(
                f"{directory / entry.name}: has {present[entry.name]} bytes, but the manifest says {entry.num_bytes}"
            )
    unexpected = sorted(present.keys() - {entry.name for entry in files})
    if unexpected:
        raise CheckpointError(f"{directory / unexpected[0]}: is not listed in the manifest")


def _check_content(directory: Path, entry: FileEntry) -> None:
    path = directory / entry.name
    try:
        # Do not follow a link: one may have replaced the file since the folder was listed.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            found = hash_file(file)
    except OSError as error:
        raise _unread(path, error) from error
    if found != entry.xxh3_128:
        raise CheckpointError(f"{path}: damaged: has checksum {found}, but the manifest says {entry.xxh3_128}")


def _unread(path: Path, error: OSError) -> CheckpointError:
    # A file that exists but cannot be read now may be undamaged.
    kind = CheckpointError if isinstance(error, FileNotFoundError) else UnreadableError
    return kind(f"{path}: {error}")


def _walk(directory: Path, prefix: str = "") -> Iterator[tuple[str, int]]:
    # Yields name and size of every regular file, also in subfolders. Raises CheckpointError for links and special
    # files.
    try:
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(Path(entry.path), name + "/")
            elif entry.is_file(follow_symlinks=False):
                yield name, entry.stat(follow_symlinks=False).st_size
            else:
                raise CheckpointError(f"{entry.path}: must be a regular file or a directory")
    except OSError as error:
        raise _unread(directory, error) from error


def _parse(body: dict[str, Any]) -> Manifest:
    try:
        if body["format_version"] == 1:
            decode(str, body["config_digest"], "config_digest")
            body = {**body, "run_name": body["run_id"], "settings": {}}
        settings = body["settings"]
        if type(settings) is not dict or not all(type(values) is dict for values in settings.values()):
            raise TypeError("manifest settings must be an object of objects")
        files = tuple(FileEntry(**_decoded(FileEntry, entry)) for entry in body["files"])
        return Manifest(**_decoded(Manifest, body, "settings", "files"), settings=settings, files=files)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"a field of the manifest is missing or has a wrong type: {error}") from None


def _decoded(kind: type[FileEntry] | type[Manifest], content: dict[str, Any], *without: str) -> dict[str, Any]:
    names = {entry.name: entry.type for entry in fields(kind) if entry.name not in without}
    return {name: decode(hint, content[name], name) for name, hint in names.items()}


def _body_checksum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    # JSON parsers differ in which of two equal keys they use. A checksum of the parsed content would not detect this.
    if len(keys) != len(set(keys)):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")
