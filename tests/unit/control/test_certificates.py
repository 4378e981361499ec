"""Tests the control channel with mutual TLS: which calls are accepted, and what is refused before anything starts."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_ft.control.certificates import Certificates
from megatron_ft.control.rpc import RpcClient, RpcError, RpcServer, new_token
from megatron_ft.errors import ConfigError
from tests.helpers.authority import make_authority

TOKEN = new_token()

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return two folders with certificates of one authority, and one folder of another authority."""
    root = tmp_path_factory.mktemp("tls")
    ours, theirs = make_authority(root / "ours"), make_authority(root / "theirs")
    return {"server": ours("server"), "agent": ours("agent"), "stranger": theirs("stranger")}


@pytest.fixture
def call(folders: dict[str, str]) -> Iterator[Callable[[str | None], dict[str, object]]]:
    """Call a server with the certificates of a folder."""
    served = RpcServer(
        "Test",
        {"echo": lambda request: request},
        interface="127.0.0.1",
        token=TOKEN,
        certificates=Certificates.read(folders["server"]),
    )
    served.start()

    def calling(folder: str | None) -> dict[str, object]:
        client = RpcClient(served.address, "Test", token=TOKEN, certificates=Certificates.read(folder))
        try:
            return client.call("echo", {"n": 1}, timeout_seconds=5)
        finally:
            client.close()

    yield calling
    served.stop()


def test_both_sides_know_each_other(call: Callable[[str | None], object], folders: dict[str, str]) -> None:
    assert call(folders["agent"]) == {"n": 1}


@pytest.mark.parametrize("who", ["stranger", None])
def test_the_token_alone_is_not_enough(
    call: Callable[[str | None], object], folders: dict[str, str], who: str | None
) -> None:
    with pytest.raises(RpcError) as refusal:
        call(None if who is None else folders[who])
    assert "UNAVAILABLE" in str(refusal.value) or "DEADLINE_EXCEEDED" in str(refusal.value)


def test_a_server_without_a_certificate_is_not_called(folders: dict[str, str]) -> None:
    served = RpcServer("Test", {"echo": lambda request: request}, interface="127.0.0.1", token=TOKEN)
    served.start()
    client = RpcClient(served.address, "Test", token=TOKEN, certificates=Certificates.read(folders["agent"]))
    with pytest.raises(RpcError):
        client.call("echo", {}, timeout_seconds=3)
    client.close()
    served.stop()


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda path: (path / "ca.pem").unlink(), "must contain ca.pem"),
        (lambda path: (path / "cert.pem").write_text("nothing"), "cert.pem in PEM"),
        (lambda path: (path / "key.pem").chmod(0o644), "its mode is 0644; set it to 0600"),
        (lambda path: (path / "ca.pem").write_bytes(b"-----BEGIN" + bytes(2**20)), "at most 1048576 bytes"),
    ],
)
def test_what_cannot_serve_is_refused(
    folders: dict[str, str], tmp_path: Path, spoil: Callable[[Path], object], word: str
) -> None:
    copy = tmp_path / "tls"
    subprocess.run(["cp", "-a", folders["agent"], str(copy)], check=True)
    spoil(copy)
    with pytest.raises(ConfigError, match=word):
        Certificates.read(str(copy))


def test_a_private_key_is_not_printed(folders: dict[str, str]) -> None:
    assert "private_key" not in repr(Certificates.read(folders["agent"]))
