"""Certificates for jobs that encrypt the control channel with mutual TLS (``control.tls_dir``).

The folder contains three files. ``ca.pem`` is the certificate of the authority that both ends of a connection trust.
``cert.pem`` is this machine's certificate, for the name or address by which other machines call this machine.
``key.pem`` is its private key, with mode 0600 or 0400.
"""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import grpc  # type: ignore[import-untyped]

from megatron_ft.errors import ConfigError

_KEY = "control.tls_dir"
_MAX_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Certificates:
    """Certificate and private key of a process, and the authority that the process trusts, in PEM format."""

    authority: bytes
    certificate: bytes
    private_key: bytes = field(repr=False)

    def of_server(self) -> grpc.ServerCredentials:
        """Return gRPC credentials for a server. The server accepts only certificates that the authority has signed."""
        pair = (self.private_key, self.certificate)
        return grpc.ssl_server_credentials([pair], self.authority, require_client_auth=True)

    def of_client(self) -> grpc.ChannelCredentials:
        """Return gRPC credentials for a caller. The caller accepts only certificates that the authority has signed."""
        return grpc.ssl_channel_credentials(self.authority, self.private_key, self.certificate)

    @classmethod
    def read(cls, folder: str | None) -> "Certificates | None":
        """Read the certificates in ``folder``, the value of ``control.tls_dir``. Return None if ``folder`` is None.

        Raises:
            ConfigError: a file is missing, too long or not PEM, or other users can read the private key.
        """
        if folder is None:
            return None
        return cls(*(_read(Path(folder) / name, folder) for name in ("ca.pem", "cert.pem", "key.pem")))


def _read(path: Path, folder: str) -> bytes:
    try:
        with path.open("rb") as file:
            # The mode is read from the open file, because the path may name another file a moment later.
            mode, content = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError.of(_KEY, folder, f"must contain {path.name}: {error.strerror}") from None
    if path.name == "key.pem" and mode & 0o077:
        raise ConfigError.of(
            _KEY, folder, f"must not let other users read {path.name}: its mode is {mode:04o}; set it to 0600"
        )
    if len(content) > _MAX_BYTES or b"-----BEGIN" not in content:
        raise ConfigError.of(_KEY, folder, f"must contain {path.name} in PEM format with at most {_MAX_BYTES} bytes")
    return content
