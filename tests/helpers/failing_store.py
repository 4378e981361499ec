"""Defines a file system of fsspec whose client fails like clients of object stores, with errors that are not
OSErrors."""

from typing import Any, ClassVar

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem


class ClientError(Exception):
    """Error class of a client, like those of botocore; not an OSError."""


class FailingFile(MemoryFile):  # type: ignore[misc]
    """File of a store that can refuse calls."""

    def write(self, data: bytes) -> int:
        FailingStore.reach("write")
        return int(super().write(data))

    def read(self, size: int = -1) -> bytes:
        FailingStore.reach("read")
        return bytes(super().read(size))


class FailingStore(MemoryFileSystem):  # type: ignore[misc]
    """Store in memory that refuses the calls named in ``refused``."""

    protocol = "failing"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    refused: ClassVar[set[str]] = set()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("failing://")))

    @classmethod
    def reach(cls, call: str) -> None:
        """Raise an error if ``call`` is refused."""
        if call in cls.refused:
            raise ClientError(f"{call}: the token has expired")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> MemoryFile:
        self.reach(f"open {mode}")
        file = super()._open(path, mode, **options)
        file.__class__ = FailingFile
        return file

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.reach("makedirs")
        super().makedirs(path, exist_ok=exist_ok)

    def exists(self, path: str, **options: Any) -> bool:
        self.reach("exists")
        return bool(super().exists(path, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.reach("ls")
        return super().ls(path, detail=detail, **options)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        self.reach("mv")
        super().mv(path1, path2, **options)

    def rm(self, path: str, **options: Any) -> None:
        self.reach("rm")
        super().rm(path, **options)
