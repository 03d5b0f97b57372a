"""Files that appear whole: by no error, kill or planted link does anything else happen to the disk."""

import errno
import os
import signal
import stat
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from fedpriv.accounting import compare_mechanisms
from fedpriv.attacks.membership.attacks import Signals, write_signals
from fedpriv.attacks.observation import Observation, PublicSettings, write_observation
from fedpriv.core import files
from fedpriv.core.cli.account.text import draw_comparison
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError, RunFailedError
from fedpriv.core.files import (
    WriteError,
    append_line,
    is_empty,
    locked,
    remove_parts,
    write_once,
    write_whole,
    writing,
    writing_to,
)
from fedpriv.core.records import Asked, RoundRecord
from fedpriv.core.runs import Checkpoint, RunFolder
from fedpriv.deploy.certificates import Authority, make_node_key
from fedpriv.deploy.flower import write_connection
from fedpriv.deploy.folder import DeploymentFolder, DeploymentRecord
from fedpriv.deploy.processes import start, stop
from fedpriv.deploy.report import Listened, write_listened
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.page import write_comparison
from fedpriv.sweep.record import TrialRecord
from tests.full_disk import fill_up, leftovers

MINE = b"another user's file"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file that nobody here may touch."""
    path = tmp_path / "elsewhere" / "mine"
    path.parent.mkdir()
    path.write_bytes(MINE)
    return path


@pytest.fixture
def here(tmp_path: Path) -> Path:
    path = tmp_path / "here"
    path.mkdir()
    return path


# ---- one file -------------------------------------------------------------------------------------------------------


def _nothing(path: Path, mine: Path) -> None:
    pass


def _file(path: Path, mine: Path) -> None:
    path.write_bytes(b"old")


def _link(path: Path, mine: Path) -> None:
    path.symlink_to(mine)


def _dangling(path: Path, mine: Path) -> None:
    path.symlink_to(mine.with_name("none"))


def _hard_link(path: Path, mine: Path) -> None:
    path.hardlink_to(mine)


THERE: dict[str, Callable[[Path, Path], None]] = {
    "nothing": _nothing, "a file": _file, "a link": _link, "a dangling link": _dangling, "a hard link": _hard_link
}  # fmt: skip


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("there", THERE)
@pytest.mark.parametrize("content", [b"", b"new", bytes(3_000_000)], ids=["empty", "short", "long"])
def test_a_file_takes_the_place_of_what_was_there(
    content: bytes, there: str, durable: bool, here: Path, mine: Path
) -> None:
    THERE[there](here / "file", mine)
    write_whole(here / "file", content, durable=durable)
    assert not (here / "file").is_symlink()
    assert (here / "file").read_bytes() == content
    assert [path.name for path in here.iterdir()] == ["file"]
    assert [path.name for path in mine.parent.iterdir()] == ["mine"]
    assert mine.read_bytes() == MINE


@pytest.mark.parametrize("there", THERE)
@pytest.mark.parametrize("step", ["open", "_fill", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_where_it_cannot_be_written_nothing_changes(
    error: BaseException, step: str, there: str, here: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    THERE[there](here / "file", mine)
    before = {path.name: (path.is_symlink(), path.lstat().st_ino) for path in here.iterdir()}

    def fails(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(files if step == "_fill" else files.os, step, fails)
        with pytest.raises(WriteError if isinstance(error, OSError) else KeyboardInterrupt) as raised:
            write_whole(here / "file", b"new", durable=True)
    assert {path.name: (path.is_symlink(), path.lstat().st_ino) for path in here.iterdir()} == before
    assert mine.read_bytes() == MINE
    if isinstance(raised.value, WriteError):
        assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(here / "file"))


@pytest.mark.parametrize("there", ["a file", "a link", "a dangling link", "a hard link"])
def test_a_part_that_is_there_already_is_neither_used_nor_removed(
    there: str, here: Path, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if somebody had guessed the name, which has 64 random bits."""
    monkeypatch.setattr(files.secrets, "token_hex", lambda _: "0123456789abcdef")
    part = here / ".file.0123456789abcdef.part"
    THERE[there](part, mine)
    before = part.lstat()
    with pytest.raises(WriteError, match="File exists"):
        write_whole(here / "file", b"new")
    assert (part.lstat().st_ino, part.lstat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [path.name for path in here.iterdir()] == [part.name]
    assert [path.name for path in mine.parent.iterdir()] == ["mine"]
    assert mine.read_bytes() == MINE


@pytest.mark.parametrize(
    ("path", "number"), [("none/file", errno.ENOENT), ("file/file", errno.ENOTDIR), ("folder", errno.EISDIR)]
)
def test_a_path_that_is_wrong_is_named_as_it_was_given(path: str, number: int, here: Path) -> None:
    (here / "file").write_bytes(b"")
    (here / "folder").mkdir()
    with pytest.raises(WriteError) as raised:
        write_whole(here / path, b"new")
    assert (raised.value.errno, raised.value.filename) == (number, str(here / path))
    assert leftovers(here) == []


@pytest.mark.parametrize("durable", [False, True])
def test_what_is_no_regular_file_is_not_replaced(durable: bool, here: Path) -> None:
    """As a device is none: root could rename a file over it."""
    os.mkfifo(here / "pipe")
    with pytest.raises(WriteError, match="it exists, and is no regular file") as raised:
        write_whole(here / "pipe", b"new", durable=durable)
    assert raised.value.filename == str(here / "pipe")
    assert [path.is_fifo() for path in here.iterdir()] == [True]


@pytest.mark.parametrize("name", ["x" * 255, "ä" * 127, "🂡" * 63])
def test_names_may_be_as_long_as_the_file_system_takes_them(name: str, here: Path) -> None:
    write_whole(here / name, b"new")
    assert (here / name).read_bytes() == b"new"


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize("mode", [0o666, 0o600])
def test_permissions_hold_from_the_first_byte_on(
    mode: int, umask: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "file").write_bytes(b"old")
    (here / "file").chmod(0o644)
    modes: list[int] = []
    filled = files._fill

    def fill(descriptor: int, content: bytes) -> None:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        filled(descriptor, content)

    monkeypatch.setattr(files, "_fill", fill)
    usual = os.umask(umask)
    try:
        write_whole(here / "file", b"new", mode=mode)
    finally:
        os.umask(usual)
    assert modes == [stat.S_IMODE((here / "file").stat().st_mode)] == [mode & ~umask]


def test_two_who_write_the_same_file_do_not_meet(here: Path) -> None:
    failures: list[OSError] = []

    def write(letter: bytes) -> None:
        try:
            for _ in range(200):
                write_whole(here / "file", letter * 10_000)
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (here / "file").read_bytes() in (b"a" * 10_000, b"b" * 10_000)
    assert [path.name for path in here.iterdir()] == ["file"]


@pytest.mark.parametrize("there", THERE)
def test_what_is_written_once_stays(there: str, here: Path, mine: Path) -> None:
    THERE[there](here / "file", mine)
    before = {path.name: path.lstat().st_ino for path in here.iterdir()}
    assert write_once(here / "file", b"new", mode=0o600) == (there == "nothing")
    assert not write_once(here / "file", b"newer", mode=0o600)
    assert [path.name for path in here.iterdir()] == ["file"]
    if there == "nothing":
        assert ((here / "file").read_bytes(), stat.S_IMODE((here / "file").stat().st_mode)) == (b"new", 0o600)
    else:
        assert {path.name: path.lstat().st_ino for path in here.iterdir()} == before
    assert mine.read_bytes() == MINE


def test_what_cannot_be_written_once_is_not_taken_for_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(WriteError, match="No space"):
        patch.setattr(files, "_fill", full)
        write_once(here / "file", b"new")
    assert list(here.iterdir()) == []


def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is brought to the disk, and what gets its name, in order."""
    seen: list[str] = []
    names: dict[int, str] = {}
    opened, synced, replaced = os.open, os.fsync, os.replace

    def remember(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = opened(path, flags, mode)
        names[descriptor] = "part" if files.is_part(Path(path).name) else Path(path).name
        return descriptor

    def sync(descriptor: int) -> None:
        seen.append(f"sync {names[descriptor]}")
        synced(descriptor)

    def replace(source: Path, target: Path) -> None:
        seen.append(f"name {Path(target).name}")
        replaced(source, target)

    for name, function in (("open", remember), ("fsync", sync), ("replace", replace)):
        monkeypatch.setattr(files.os, name, function)
    return seen


def test_the_checkpoint_reaches_the_disk_after_the_lines_that_it_rests_on(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = events(monkeypatch)
    folder = RunFolder.create(here / "run", Experiment())
    assert seen == ["sync part", "name config.toml", "sync run"]
    folder.append_asked(Asked(1, (0,)))
    folder.append_round(RECORD)
    seen.clear()
    folder.save_checkpoint(CHECKPOINT)
    named = "name server.safetensors"
    assert seen == ["sync asked.jsonl", "sync metrics.jsonl", "sync part", named, "sync checkpoint"]


def test_a_file_system_that_cannot_sync_folders_will_do(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = os.fsync

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        synced(descriptor)

    monkeypatch.setattr(files.os, "fsync", sync)
    write_whole(here / "file", b"new", durable=True)
    assert (here / "file").read_bytes() == b"new"


# ---- lines ----------------------------------------------------------------------------------------------------------


def test_lines_are_added(here: Path) -> None:
    for line in ("one", "ä", ""):
        append_line(here / "lines", line)
    assert (here / "lines").read_text(encoding="utf-8") == "one\nä\n\n"


def test_a_line_that_does_not_fit_is_taken_back(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_line(here / "lines", "one")
    with monkeypatch.context() as patch:
        fill_up(patch, "lines")
        with pytest.raises(WriteError, match="No space left"):
            append_line(here / "lines", "two, a long one")
    append_line(here / "lines", "three")
    assert (here / "lines").read_text() == "one\nthree\n"


@pytest.mark.parametrize("there", ["a link", "a dangling link"])
def test_lines_are_not_added_through_a_link(there: str, here: Path, mine: Path) -> None:
    THERE[there](here / "lines", mine)
    with pytest.raises(WriteError, match="it is a symbolic link, which is not followed") as raised:
        append_line(here / "lines", "one")
    assert raised.value.filename == str(here / "lines")
    assert [path.name for path in mine.parent.iterdir()] == ["mine"]
    assert mine.read_bytes() == MINE


# ---- one writer at a time ------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_the_lock_goes_with_the_first(here: Path) -> None:
    with locked(here):
        with pytest.raises(InputError, match=rf"here is being written by process {os.getpid()}$"), locked(here):
            pass
        assert not is_empty(here)
    assert is_empty(here)
    with locked(here):
        pass


def test_who_was_killed_locks_nobody_out(here: Path) -> None:
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        with locked(here):
            os.write(theirs, b"locked")
            signal.pause()
    os.read(ours, 6)
    with pytest.raises(InputError, match=rf"process {child}$"), locked(here):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (here / ".lock").read_text() == f"{child}\n"
    with locked(here):
        assert (here / ".lock").read_text() == f"{os.getpid()}\n"


def test_who_waits_writes_when_the_others_are_done(here: Path) -> None:
    """Many at a time: each removes the lock file of the one that the next is waiting for."""
    inside, most = [], []

    def write() -> None:
        for _ in range(20):
            with locked(here, wait=True):
                inside.append(None)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 80 and is_empty(here)


def test_where_the_file_system_has_no_locks_nobody_is_kept_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", lacking)
    with locked(here), locked(here):
        pass


# ---- what a kill leaves ---------------------------------------------------------------------------------------------


def test_parts_are_removed_and_nothing_else(here: Path, mine: Path) -> None:
    (here / ".file.0123456789abcdef.part").write_bytes(b"half")
    (here / ".link.0123456789abcdef.part").symlink_to(mine)
    kept = [".lock", ".file.part", "file.0123456789abcdef.part", ".file.0123456789abcdeg.part", "file"]
    for name in kept:
        (here / name).write_bytes(b"")
    remove_parts(here, here / "none")
    assert sorted(path.name for path in here.iterdir()) == sorted(kept)
    assert mine.read_bytes() == MINE


def test_a_folder_with_nothing_but_parts_is_empty(here: Path) -> None:
    assert is_empty(here)
    (here / ".config.toml.0123456789abcdef.part").write_bytes(b"half")
    assert is_empty(here)
    assert RunFolder.create(here, Experiment(name="x")).experiment().name == "x"
    assert not is_empty(here)
    assert not is_empty(here / "config.toml")
    assert not is_empty(here / "none")


# ---- everybody who writes -------------------------------------------------------------------------------------------

RECORD = RoundRecord(1, 1.5, 0.25, (0,), (0,), (), 0.1, 10, 20)
CHECKPOINT = Checkpoint(1, {"a": torch.zeros(2)})
TRIAL = TrialRecord(trial=1, folder="trials/0001", status="completed", seed=1)


def _signals() -> Signals:
    one = torch.zeros(1, 1).double().numpy()
    models = one[None]
    inside, rounds = one.astype(bool), torch.ones(1, dtype=torch.int64).numpy()
    return Signals(one, models, inside, one, models, rounds, one, models)


def _observation(path: Path) -> Path:
    network = {"model": {"name": "mlp"}, "shape": (1, 2, 2), "classes": 2, "mean": (0.5,), "std": (0.5,)}
    work = {"algorithm": "fedsgd", "batch_size": 1, "local_steps": 1, "learning_rate": 0.1, "client_examples": 1}
    rest = {"optimizer": "sgd", "momentum": 0.0, "mechanism": {"name": "none"}}
    settings = TypeAdapter(PublicSettings).validate_python({**network, **work, **rest})
    return write_observation(path, Observation(3, 2, {"a": torch.zeros(2)}, {"a": torch.zeros(2)}, settings))


def _plot(path: Path) -> None:
    found = compare_mechanisms([1.0], 1e-5, dimension=10, batch_size=2, participations=1, rate=None, block_size=None)
    draw_comparison(found, path / "plot.png")


def _deployment(path: Path) -> DeploymentFolder:
    folder = DeploymentFolder(path)
    folder.flower.mkdir(exist_ok=True)
    return folder


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a run's file": ("summary.json", lambda path: RunFolder(path).write_json("summary.json", {})),
    "metrics": ("metrics.jsonl", lambda path: RunFolder(path).keep_rounds(1)),
    "checkpoint": ("checkpoint/server.safetensors", lambda path: RunFolder(path).save_checkpoint(CHECKPOINT)),
    "observation": ("0003-0002.safetensors", _observation),
    "what is public of it": ("0003-0002.json", _observation),
    "signals": ("signals.npz", lambda path: write_signals(path / "signals.npz", _signals())),
    "comparison": ("report.html", lambda path: write_comparison([TRIAL], path / "report.html", title="x")),
    "plot": ("plot.png", _plot),
    "a sweep's command": ("command.txt", lambda path: SweepFolder(path).write_command("x")),
    "a sweep's results": ("results.csv", lambda path: SweepFolder(path).write_results([TRIAL])),
    "a trial's record": ("trials/0001/record.json", lambda path: SweepFolder(path).write_record(TRIAL)),
    "a deployment": ("deployment.json", lambda path: _deployment(path).write(DeploymentRecord(1, 8000, False, ()))),
    "Flower's connection": ("flower/config.toml", lambda path: write_connection(_deployment(path), "here:1", None)),
    "a certificate": ("server.pem", lambda path: Authority().certify(path, ["localhost"])),
    "its key": ("server.key", lambda path: Authority().certify(path, ["localhost"])),
    "a node's key": ("node", lambda path: make_node_key(path / "node")),
    "its public half": ("node.pub", lambda path: make_node_key(path / "node")),
    "the listener": ("listener.json", lambda path: write_listened(path, Listened("here:1", "there:2", {}))),
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITERS)
def test_nobody_writes_through_a_planted_link(writer: str, here: Path, mine: Path) -> None:
    """Neither one of the file's name nor one of the name that its part had before names were random."""
    name, write = WRITERS[writer]
    path = here / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(mine)
    part = path.with_suffix(".part") if writer == "a deployment" else path.with_name(f".{path.name}.part")
    part.symlink_to(mine)
    write(here)
    assert not path.is_symlink()
    assert path.stat().st_size > 0 or writer == "metrics"
    assert part.is_symlink()
    assert mine.read_bytes() == MINE


def _at_work(path: Path) -> None:
    with SweepFolder(path).at_work():
        pass


def _trial_at_work(path: Path) -> None:
    with SweepFolder(path).trial_at_work(1):
        pass


def _process(path: Path) -> None:
    stop([start("x", ["sleep", "60"], os.environ, path, path / "x.log")])


OPENERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "asked": ("asked.jsonl", lambda path: RunFolder(path).append_asked(Asked(1, (0,)))),
    "metrics": ("metrics.jsonl", lambda path: RunFolder(path).append_round(RECORD)),
    "a sweep's lock": (".lock", _at_work),
    "a trial's lock": ("trials/.0001.lock", _trial_at_work),
    "a log": ("x.log", _process),
}


@pytest.mark.parametrize("there", ["a link", "a dangling link"])
@pytest.mark.parametrize("opener", OPENERS)
def test_nobody_adds_to_a_file_behind_a_planted_link(opener: str, there: str, here: Path, mine: Path) -> None:
    name, write = OPENERS[opener]
    (here / "trials").mkdir()
    THERE[there](here / name, mine)
    with pytest.raises((OSError, InputError), match="it is a symbolic link, which is not followed"):
        write(here)
    assert [path.name for path in mine.parent.iterdir()] == ["mine"]
    assert mine.read_bytes() == MINE


# ---- how it is told -------------------------------------------------------------------------------------------------

FAULTS = {
    errno.ENOENT: "No such file or directory",
    errno.EACCES: "Permission denied",
    errno.EROFS: "Read-only file system",
    errno.EISDIR: "Is a directory",
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "Disk quota exceeded",
    errno.EFBIG: "File too large",
    errno.EIO: "Input/output error",
}
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@pytest.mark.parametrize("number", FAULTS)
@pytest.mark.parametrize(
    ("block", "given", "disk"),
    [
        (lambda: writing("fedpriv x"), "a/b cannot be written: {}; go on with: fedpriv x", None),
        (lambda: writing(""), "a/b cannot be written: {}", None),
        (lambda: writing_to("--plot a:"), "--plot a: cannot be written: {}", "; then give the same command again"),
    ],
    ids=["writing", "without a command", "writing to"],
)
def test_what_cannot_be_written_is_one_line(
    block: Callable[[], AbstractContextManager[None]], given: str, disk: str | None, number: int
) -> None:
    """A path that a user gave may be wrong (exit code 2); a disk never is the user's input (1)."""
    expected = RunFailedError if disk is None or number in DISK else InputError
    text = given.format(FAULTS[number]) + (disk or "" if number in DISK else "")
    with pytest.raises(expected) as raised, block():
        raise WriteError(number, FAULTS[number], "a/b")
    assert str(raised.value) == text


def test_what_else_goes_wrong_is_not_called_a_write() -> None:
    with pytest.raises(RunFailedError, match=r"^a/b: Permission denied; go on with: fedpriv x$"), writing("fedpriv x"):
        raise OSError(errno.EACCES, "Permission denied", "a/b")
    with pytest.raises(RunFailedError, match=r"^the link is down; go on with: fedpriv x$"), writing("fedpriv x"):
        raise ConnectionError("the link is down")
