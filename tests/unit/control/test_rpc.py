"""Tests tokens, sizes, methods and addresses of the RPC layer."""

from collections.abc import Iterator

import grpc
import pytest

from megatron_ft.control.rpc import RpcClient, RpcError, RpcServer, check_interface, new_token
from megatron_ft.errors import ConfigError, ControlError
from megatron_ft.framing import Message
from megatron_ft.testing.attacks import crowd, headers_without_body
from tests.unit.snapshot.server.proxy import proxy

TOKEN = new_token()


def fail(request: Message) -> Message:
    raise ControlError("no, because")


@pytest.fixture
def calls() -> list[Message]:
    return []


@pytest.fixture
def server(calls: list[Message]) -> Iterator[RpcServer]:
    def echo(request: Message) -> Message:
        calls.append(request)
        return {"echo": request["value"]}

    methods = {"echo": echo, "fail": fail}
    served = RpcServer("Test", methods, interface="127.0.0.1", token=TOKEN, max_message_bytes=10_000)
    served.start()
    yield served
    served.stop()


def client(server: RpcServer, token: str = TOKEN, service: str = "Test") -> RpcClient:
    return RpcClient(server.address, service, token=token)


def test_a_call_is_answered(server: RpcServer) -> None:
    assert client(server).call("echo", {"value": [1, "ü", None]}, timeout_seconds=5) == {"echo": [1, "ü", None]}


def test_a_peer_that_accepts_its_connection_late_is_reached(server: RpcServer) -> None:
    """On a busy machine, it takes long until the peer sends its first bytes."""
    with proxy(server.address, lambda _, data: data, accept_after_seconds=0.7) as late:
        late_client = RpcClient(late.address, "Test", token=TOKEN)
        assert late_client.call("echo", {"value": 1}, timeout_seconds=30) == {"echo": 1}
        late_client.close()


@pytest.mark.parametrize(
    "token",
    [new_token(), "", TOKEN[:-1], TOKEN + "0", TOKEN.upper() + "x"],
    ids=["another", "empty", "short", "long", "upper case"],
)
@pytest.mark.parametrize("method", ["echo", "nothing"])
def test_a_wrong_token_reaches_no_method(server: RpcServer, calls: list[Message], token: str, method: str) -> None:
    with pytest.raises(RpcError, match="UNAUTHENTICATED") as caught:
        client(server, token).call(method, {"value": 1}, timeout_seconds=5)
    assert caught.value.refused
    assert not calls


def test_a_missing_token_reaches_no_method(server: RpcServer, calls: list[Message]) -> None:
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
        channel.unary_unary("/Test/echo")(b"{}", timeout=5)
    assert not calls


@pytest.mark.parametrize(("service", "method"), [("Test", "nothing"), ("Other", "echo"), ("Test", "__init__")])
def test_unknown_methods_are_refused(server: RpcServer, service: str, method: str) -> None:
    with pytest.raises(RpcError, match="UNIMPLEMENTED"):
        client(server, service=service).call(method, {}, timeout_seconds=5)


def test_large_messages_are_refused_and_the_server_goes_on(server: RpcServer, calls: list[Message]) -> None:
    caller = client(server)
    with pytest.raises(RpcError, match="RESOURCE_EXHAUSTED"):
        caller.call("echo", {"value": "x" * 20_000}, timeout_seconds=5)
    assert not calls
    assert caller.call("echo", {"value": "x" * 5000}, timeout_seconds=5)["echo"]


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff\xfe", b"{" * 3000, b"null", b"{}"])
def test_malformed_bodies_are_refused(server: RpcServer, body: bytes) -> None:
    metadata = (("x-megatron-ft-token", TOKEN),)
    with grpc.insecure_channel(server.address) as channel:
        stub = channel.unary_unary("/Test/echo")
        with pytest.raises(grpc.RpcError) as caught:
            stub(body, timeout=5, metadata=metadata)
        assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
        assert stub(b'{"value": 1}', timeout=5, metadata=metadata) == b'{"echo": 1}'


def test_an_error_of_a_method_is_reported(server: RpcServer) -> None:
    with pytest.raises(RpcError, match="no, because") as caught:
        client(server).call("fail", {}, timeout_seconds=5)
    assert caught.value.refused


def test_a_peer_that_is_gone_is_no_refusal(server: RpcServer) -> None:
    caller = client(server)
    caller.call("echo", {"value": 1}, timeout_seconds=5)
    server.stop()
    with pytest.raises(RpcError) as caught:
        caller.call("echo", {"value": 1}, timeout_seconds=2)
    assert not caught.value.refused


@pytest.mark.parametrize("interface", ["0.0.0.0", "::", "[::]", "", "*", "0:0:0:0:0:0:0:0"])
def test_no_server_listens_everywhere(interface: str) -> None:
    with pytest.raises(ConfigError, match=r"control\.interface"):
        check_interface(interface)
    with pytest.raises(ConfigError, match=r"control\.interface"):
        RpcServer("Test", {}, interface=interface, token=TOKEN)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(ControlError, match="cannot listen"):
        RpcServer("Test", {}, interface="192.0.2.1", token=TOKEN)


def test_tokens_have_256_bits_and_differ() -> None:
    assert len(bytes.fromhex(new_token())) == 32
    assert len({new_token() for _ in range(100)}) == 100


@pytest.mark.parametrize("token", [None, "0" * 64])
def test_unauthenticated_callers_without_a_body_keep_no_thread(
    server: RpcServer, calls: list[Message], token: str | None
) -> None:
    """There are more such callers than the server has threads."""
    with crowd(server.address, 32, headers_without_body("/Test/echo", token)) as taken:
        assert taken == 32
        assert client(server).call("echo", {"value": 1}, timeout_seconds=5) == {"echo": 1}
    assert len(calls) == 1


@pytest.mark.parametrize("body", [b'{"value":Infinity}', b'{"value":[]}', b'{"value":"x"}', b'{"value":{}}', b"{}"])
def test_values_that_a_method_cannot_take_are_refused(body: bytes) -> None:
    def halve(request: Message) -> Message:
        return {"half": int(request["value"]) // 2, "name": request["value"].name}

    served = RpcServer("Test", {"halve": halve}, interface="127.0.0.1", token=TOKEN)
    served.start()
    try:
        metadata = (("x-megatron-ft-token", TOKEN),)
        with grpc.insecure_channel(served.address) as channel, pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            channel.unary_unary("/Test/halve")(body, timeout=5, metadata=metadata)
    finally:
        served.stop()
