"""The reverse proxy on real sockets: with a server behind it, with none, and started again in the same folder."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from fedpriv.core.errors import InputError
from fedpriv.deploy.relay import listen
from fedpriv.deploy.report import LISTENED, Listened, read_listened


def bound() -> socket.socket:
    """A socket on a free port of the loopback, where nobody is let in yet."""
    found = socket.socket()
    found.bind(("127.0.0.1", 0))
    return found


def connection(at: tuple[str, int]) -> socket.socket:
    """A connection to somebody who may not listen yet."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(at, timeout=30)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def relayed(
    server: tuple[str, int], folder: Path, act: Callable[[tuple[str, int]], None]
) -> tuple[Listened, list[str]]:
    """Listen for as long as ``act`` takes: what passed, and what was told."""
    told: list[str] = []
    with bound() as free:
        at = free.getsockname()

    def go() -> None:
        try:
            connection(at).close()
            act(at)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    # As a safety net: without a listener the signal would end this process.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    thread = Thread(target=go)
    thread.start()
    try:
        return listen(at, server, folder, told.append), told
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, before)


def test_a_listener_that_is_started_again_adds_to_what_passed_before(tmp_path: Path) -> None:
    with bound() as server:
        server.listen()

        def say(at: tuple[str, int]) -> None:
            server.accept()[0].close()  # the connection that looked whether somebody listens
            with connection(at) as node:
                node.sendall(b"no HTTP")
                node.shutdown(socket.SHUT_WR)
                passed_on, _ = server.accept()
                with passed_on:
                    assert passed_on.makefile("rb").read() == b"no HTTP"
                assert node.recv(1) == b""

        first, _ = relayed(server.getsockname(), tmp_path, say)
        second, _ = relayed(server.getsockname(), tmp_path, say)
    assert (first.connections["other"], first.bytes_up) == (1, 7)
    assert (second.connections["other"], second.bytes_up) == (2, 14)
    assert read_listened(tmp_path) == second
    assert second.address != first.address


def test_no_superlink_is_told_once_and_is_the_verdict(tmp_path: Path) -> None:
    def try_again(at: tuple[str, int]) -> None:
        for _ in range(3):
            with connection(at) as node:
                assert node.recv(1) == b""

    with bound() as nobody:
        host, port = nobody.getsockname()
        listened, told = relayed((host, port), tmp_path, try_again)
    assert [line for line in told if "no SuperLink answers" in line] == told[1:]
    assert len(told) == 2
    assert (listened.unanswered, listened.connections) == (4, {})
    assert listened.verdict.endswith(f"passed on nothing: no SuperLink answered on 127.0.0.1:{port}.")


def test_what_is_no_listeners_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / LISTENED).write_text("a thesis")
    with bound() as free, pytest.raises(InputError, match="is damaged"):
        listen(free.getsockname(), ("127.0.0.1", 1), tmp_path, print)
    assert (tmp_path / LISTENED).read_text() == "a thesis"


def test_a_port_that_is_in_use_is_one_plain_line(tmp_path: Path) -> None:
    with bound() as taken:
        taken.listen()
        host, port = taken.getsockname()
        with pytest.raises(InputError, match=rf"^cannot listen on 127.0.0.1:{port}: Address already in use$"):
            listen((host, port), ("127.0.0.1", 1), tmp_path, print)
