"""A certificate authority for tests, by the openssl command."""

import subprocess
from collections.abc import Callable
from pathlib import Path

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def make_authority(folder: Path) -> Callable[[str], str]:
    """Return a function that maps a name to a folder with ``ca.pem``, ``cert.pem`` (for 127.0.0.1) and ``key.pem``."""
    folder.mkdir()
    authority, secret = folder / "ca.pem", folder / "ca.key"
    _openssl("req", "-x509", *_CURVE, "-subj", "/CN=authority", "-keyout", secret, "-out", authority)

    def issue(name: str) -> str:
        own = folder / name
        own.mkdir()
        extensions = own / "extensions"
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        _openssl("req", *_CURVE, "-subj", f"/CN={name}", "-keyout", own / "key.pem", "-out", own / "request")
        trust = ("-CA", authority, "-CAkey", secret, "-CAcreateserial", "-days", "2", "-extfile", extensions)
        _openssl("x509", "-req", "-in", own / "request", *trust, "-out", own / "cert.pem")
        (own / "key.pem").chmod(0o600)
        (own / "ca.pem").write_bytes(authority.read_bytes())
        return str(own)

    return issue


def _openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
