"""Connections followed from outside: in whatever pieces, what is read is what was said."""

import random
import ssl
from itertools import pairwise

import pytest

from fedpriv.deploy.certificates import Authority
from fedpriv.deploy.messages import Conversation, Spoken
from fedpriv.deploy.report import ConnectionKind

BODIES = (b"", b"\x00\x16\x03 binary \r\n\r\n", bytes(range(256)) * 300)


def request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: there\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def sized(body: bytes) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def chunked(body: bytes) -> bytes:
    cuts = sorted({0, len(body) // 3, len(body) // 2, len(body)})
    pieces = [body[low:high] for low, high in pairwise(cuts)]
    coded = b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"


def pieces(data: bytes, stream: random.Random, most: int) -> list[bytes]:
    found = []
    while data:
        size = stream.randint(1, most)
        found.append(data[:size])
        data = data[size:]
    return found


@pytest.mark.parametrize("reply", [sized, chunked])
@pytest.mark.parametrize("most", [1, 7, 65536])
def test_requests_and_replies_on_a_kept_connection_are_read_whatever_the_pieces(reply, most: int) -> None:
    stream = random.Random(most)
    conversation, heard, said = Conversation(), [], []
    bodies = BODIES if most > 1 else BODIES[:2]
    for number, body in enumerate([*bodies, *reversed(bodies)]):
        path, back = f"/v1/fleet/{number}", body[::-1]
        said.append(Spoken(path, body, 200, back))
        for piece in pieces(request(path, body), stream, most):
            conversation.asked(piece)
        for piece in pieces(reply(back), stream, most):
            heard += conversation.answered(piece)
    assert heard == said
    assert conversation.kind is ConnectionKind.HTTP


def test_refusals_are_read_as_such() -> None:
    conversation = Conversation()
    conversation.asked(request("/v1/fleet/pull-messages", b"x"))
    (spoken,) = conversation.answered(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\n{}")
    assert (spoken.status, spoken.reply) == (401, b"{}")


def test_tls_is_known_by_its_first_bytes_and_nothing_of_it_is_read(tmp_path) -> None:
    Authority().certify(tmp_path, ("localhost",))
    client_context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(down, up, server_hostname="localhost")
    server_in = ssl.MemoryBIO()
    server_out = ssl.MemoryBIO()
    server = server_context.wrap_bio(server_in, server_out, server_side=True)
    conversation, heard = Conversation(), []

    def step(side, method) -> bool:
        try:
            method()
        except ssl.SSLWantReadError:
            return False
        return True

    def carry() -> None:
        sent = up.read()
        conversation.asked(sent)
        server_in.write(sent)
        step(server, server.do_handshake)
        back = server_out.read()
        heard.extend(conversation.answered(back))
        down.write(back)

    for _ in range(4):
        step(client, client.do_handshake)
        carry()
    client.write(request("/v1/fleet/push-object", b"secret"))
    sent = up.read()
    conversation.asked(sent)
    server_in.write(sent)
    assert server.read(1000).endswith(b"secret")  # the two ends do understand each other
    server.write(sized(b"answer"))
    heard.extend(conversation.answered(server_out.read()))
    assert conversation.kind is ConnectionKind.TLS
    assert heard == []


@pytest.mark.parametrize("seed", range(20))
def test_what_is_no_http_is_left_alone(seed: int) -> None:
    stream = random.Random(seed)
    conversation = Conversation()
    for _ in range(20):
        conversation.asked(b"A" + stream.randbytes(stream.randint(1, 200)))
        assert conversation.answered(stream.randbytes(stream.randint(1, 200))) == ()
    assert conversation.kind is ConnectionKind.OTHER


def test_a_server_that_speaks_first_is_no_http() -> None:
    conversation = Conversation()
    assert conversation.answered(b"220 welcome\r\n") == ()
    conversation.asked(request("/", b""))
    assert conversation.answered(sized(b"")) == ()
    assert conversation.kind is ConnectionKind.OTHER
