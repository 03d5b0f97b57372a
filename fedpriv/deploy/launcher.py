"""Start Flower's programs without importing PyTorch, Flower and other large packages every time.

Flower starts a program for each message, which would spend most of its CPU time on imports. Here one process
imports once and forks. Programs of the same names, ahead on the search path, ask it and stand for the fork: they have
its output and exit code, and it ends with them. Where nobody answers they become the real program. A deployment's
other processes are forks, too, which nobody stands for.

This file runs by itself, and must not import fedpriv: each app brings its own.
"""

import atexit
import gc
import json
import os
import shlex
import signal
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import NoReturn

LAUNCHED = ("flwr", "flwr-clientapp", "flwr-serverapp")
"""Flower's programs that start for each message or question."""
SERVING = ("flower-superlink", "flower-supernode", "flower-superexec")
"""Flower's programs that run as long as the deployment."""
# In the folder of the programs that ask.
SOCKET = "launcher.sock"
# The first byte of an answer: from here on the program runs, and must not be started a second time.
_STARTED = b"+"
# Flower's programs do not need these, the apps do: two thirds of the CPU time that a message would take.
_APPS_IMPORT = (
    "torch",
    "cryptography",
    "pydantic",
    "randomgen",
    "scipy.stats",
    "sklearn.datasets",
    "sklearn.model_selection",
)


def write_stand_ins(folder: Path, programs: Mapping[str, str]) -> None:
    """Write programs of these names, isolated and quick, that have the launcher of ``folder`` run the real ones."""
    for name, real in programs.items():
        words = [sys.executable, "-I", "-S", str(Path(__file__)), "ask", str(folder), real]
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / name).chmod(0o700)


def _serve(folder: str, programs: list[str]) -> None:
    """Fork for each who asks, for ever."""
    os.chdir(folder)  # the address of a socket is at most 108 bytes long, a folder's name may be longer
    Path(SOCKET).unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(SOCKET)
    server.listen(128)  # who asks from here on waits for the imports
    gc.disable()  # of a million new objects none is garbage
    for program in programs:
        _entry(program)
    for module in _APPS_IMPORT:
        import_module(module)
    gc.enable()
    gc.freeze()  # keeps the memory of what is imported shared with the forks
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = server.accept()
        with connection:
            if os.fork() == 0:
                server.close()
                _run(connection)


def _run(connection: socket.socket) -> NoReturn:
    """Become the program that is asked for: its arguments, environment, folder, input and output."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    reader = connection.makefile("rb")
    asked = json.loads(reader.readline())
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = asked["arguments"]
    if asked["outlives"]:
        os.setsid()
        connection.sendall(str(os.getpid()).encode())
        connection.shutdown(socket.SHUT_RDWR)
    else:
        connection.sendall(_STARTED)
        threading.Thread(target=_end_with, args=(reader,), daemon=True).start()
    code = _code(Path(sys.argv[0]).name)
    with suppress(OSError):  # who asked has ended, and so shall we
        connection.sendall(bytes([code]))
    os._exit(code)


def beside(folder: Path, programs: list[str], command: list[str]) -> None:
    """Become a command whose ``programs`` are run by a launcher in ``folder``, which ends with it."""
    scripts = Path(sysconfig.get_path("scripts"))
    write_stand_ins(folder, {program: str(scripts / program) for program in programs})
    Popen([sys.executable, "-P", __file__, "serve", str(folder), *programs], stdin=DEVNULL)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])
    os.execvp(command[0], command)


def _entry(program: str) -> Callable[[], object]:
    """Import an installed program, and return its function."""
    from importlib.metadata import entry_points  # who only asks does without it

    (entry,) = entry_points(group="console_scripts", name=program)
    return entry.load()


def _code(program: str) -> int:
    """Run a program to its end and return its exit code, without taking down modules, which costs most of a message."""
    code: object = None
    try:
        _entry(program)()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
    except BaseException:  # noqa: BLE001 - what Python does with it, too
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code & 255 if isinstance(code, int) else int(code is not None)


def _end_with(reader: BufferedReader) -> None:
    """End this process when the other end of the connection does."""
    reader.read()
    os.kill(os.getpid(), signal.SIGTERM)


def start_fork(
    folder: Path, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path, files: Sequence[int]
) -> int | None:
    """Have the launcher of ``folder`` run a program in its own session; return its number; ``None``: no answer."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        _connect(connection, str(folder))
        _send(connection, arguments, environment, cwd, files, outlives=True)
        return int(connection.recv(32) or 0) or None
    return None


def _send(
    connection: socket.socket,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    files: Sequence[int],
    outlives: bool,
) -> None:
    """Say what is to be run; a program that outlives who asks answers with its number, and closes the connection."""
    socket.send_fds(connection, [b"\0"], files)
    asked = {"folder": str(cwd), "environment": dict(environment), "arguments": arguments, "outlives": outlives}
    connection.sendall(json.dumps(asked).encode() + b"\n")


def _ask(folder: str, arguments: list[str]) -> None:
    """Have the launcher run a program, and end as it ended; without an answer, become the program."""
    answer = b""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        _connect(connection, folder)
        _send(connection, arguments, os.environ, Path.cwd(), [0, 1, 2], outlives=False)
        while part := connection.recv(2):
            answer += part
    if not answer:
        os.execv(arguments[0], arguments)
    # A program that was killed has sent no code.
    sys.exit(answer[len(_STARTED)] if len(answer) > len(_STARTED) else 1)


def _connect(connection: socket.socket, folder: str) -> None:
    here = Path.cwd()
    os.chdir(folder)
    try:
        connection.connect(SOCKET)
    finally:
        os.chdir(here)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", folder, *programs]:
            _serve(folder, programs)
        case ["ask", folder, *arguments]:
            _ask(folder, arguments)
