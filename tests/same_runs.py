"""Compare what two source trees write for the same commands: ``make same BEFORE=../fedpriv-before``.

Each case runs in a folder of its own with each tree. Files are compared byte for byte, without seconds and versions.
Exit code 1 if any file differs. ``--only pate deployed`` runs some cases; ``deployed`` takes a minute and is not among
those that run without it.
"""

import argparse
import difflib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]

# What differs between two runs of one tree.
_TIMES = {"seconds", "versions", "cpu_seconds", "peak_bytes"}
_SECONDS = re.compile(r"(<dt>Time[^<]*</dt><dd>)[^<]*|\b[\d.,]+ (?:h|min|s|ms)\b(?: \d+ (?:min|s)\b)?")
# Archives and logs: their bytes hold times; keys and certificates are drawn anew.
_SKIPPED = re.compile(
    r"\.(?:log|lock|pid|pem|key|crt|png|fab)$|/keys/|/tls/|__pycache__|asked_at|/deployment/|\.parquet$"
)

_SMALL = ("noise='reproducible'", "engine.device='cpu'")
RUNS: dict[str, tuple[str, ...]] = {
    "adult": ("federation.rounds=6", "adversary.tabular.iterations=20", "adversary.tabular.restarts=2"),
    "canaries": ("federation.rounds=4", "federation.evaluate_every=2"),
    "cloak": ("federation.rounds=2",),
    "dager": ("data.train_examples=400", "data.text.tests=40", "adversary.victims=1"),
    "erm": (),
    "extraction": ("federation.rounds=4",),
    "faces": ("federation.rounds=2", "training.local_epochs=1"),
    "fashion-mnist-leak": ("adversary.victims=1", "adversary.iga.iterations=60", "adversary.attacks=['iga','map']"),
    "fashion-mnist": ("federation.rounds=1", "training.batch_size=30", "data.train_examples=2000"),
    "fishing": ("data.name='digits'", "adversary.victims=1", "adversary.fishing.iterations=20"),
    "imprint": ("federation.rounds=3",),
    "labels": ("federation.rounds=1", "data.train_examples=2000"),
    "lora": ("federation.rounds=2", "federation.clients_per_round=3"),
    "many-clients": ("federation.rounds=2",),
    "pate": ("federation.clients=50", "pate.local_epochs=2", "pate.student_epochs=2"),
    "quickstart": ("federation.rounds=20", "adversary.iga.iterations=60"),
    "shakespeare": ("federation.rounds=2", "federation.clients_per_round=4"),
    "sst2": ("federation.rounds=2", "data.train_examples=1000"),
    "wiretap": (),
}
# What follows a run in the same folder.
AFTER: dict[str, tuple[str, ...]] = {
    "quickstart": (
        "attack run --attack idlg --quiet",
        "audit run --references 6 --pairs 40 --quiet",
        "certify run --noise 0.25 --place input --examples 8 --votes 100 --quiet",
        "probe run --attack pgd --quiet",
        "report run",
    ),
    "extraction": (
        "probe run --attack equation-solving --quiet",
        "probe run --attack membership-answers --answers rounded:2 --quiet",
    ),
    "faces": ("probe run --attack mi-face --quiet",),
    "canaries": ("audit run --samples 20 --quiet",),
    "erm": ("report run",),
}
OTHERS: dict[str, tuple[str, ...]] = {
    "icl": ("icl configs/icl.toml --set icl.queries=20 --set leaks.pairs=40 --quiet --out run",),
    "account": (
        "account gaussian --sigma 1.1 --sampling poisson --rate 0.01 --steps 1000",
        "account votes --help",
        "account erm --help",
        "account compare --help",
        "config schema",
        "config schema --icl",
        "config show configs/quickstart.toml",
        "config show configs/pate.toml --json",
        "config check configs/erm.toml",
        "attack list",
        "probe list",
        "data",
        "run configs/quickstart.toml --set mechanism.kapa=3",
        "run configs/quickstart.toml --set training.batch_size=400",
        "run configs/quickstart.toml --set federation.algorithm=pate",
        "account gaussian --sigma -1",
    ),
}


def main() -> None:
    """Run the cases with both trees and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="the other tree, or a folder that --keep wrote")
    parser.add_argument("--only", nargs="*", default=[*RUNS, *OTHERS, "resumed"], help=f"{', '.join(RUNS)}, ...")
    parser.add_argument("--keep", action="store_true", help="only run this tree's cases, into the folder BEFORE")
    told = parser.parse_args()
    if told.keep:
        for name in told.only:
            run_case(HERE, told.before / name, name)
        return
    differ = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in told.only:
            before, now = told.before / name, Path(scratch, "now", name)
            if (told.before / "pyproject.toml").is_file():
                before = Path(scratch, "before", name)
                run_case(told.before, before, name)
            run_case(HERE, now, name)
            found = list(compared(before, now))
            differ += len(found)
            print("\n".join([f"{name}: {f'{len(found)} files differ' if found else 'same'}", *found]), flush=True)
    sys.exit(differ > 0)


def run_case(tree: Path, folder: Path, name: str) -> None:
    """Run a case's commands with a tree, in a folder with what they print."""
    folder.mkdir(parents=True)
    (folder / "configs").symlink_to(tree.resolve() / "configs")
    if name == "deployed":
        _deployed(tree, folder)
        return
    if name == "resumed":
        _interrupted(tree, folder)
        commands: list[str] = ["run --resume run --quiet"]
    elif name in RUNS:
        keys = " ".join(f"--set {key}" for key in (*_SMALL, *RUNS[name]))
        commands = [f"run configs/{name}.toml {keys} --quiet --out run", *AFTER.get(name, ())]
    else:
        commands = list(OTHERS[name])
    for number, command in enumerate(commands):
        code = _command(tree, folder, command, f"printed-{number}.txt")
        if code == 2 and name != "account":  # which asks for what is refused, on purpose
            sys.exit(f"{name}: nothing to compare, since {command!r} is refused; data sets need FEDPRIV_DATA")
    (folder / "configs").unlink()


def _command(tree: Path, folder: Path, command: str, printed: str) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "fedpriv", *command.split()],
        cwd=folder, env=_environment(tree), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    (folder / printed).write_text(f"fedpriv {command}\n{done.stdout}\nexit code {done.returncode}\n")
    return done.returncode


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree.resolve()), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def _interrupted(tree: Path, folder: Path) -> None:
    """Stop a run of the quickstart after some of its rounds."""
    keys = [f"--set={key}" for key in (*_SMALL, *RUNS["quickstart"])]
    command = [sys.executable, "-m", "fedpriv", "run", "configs/quickstart.toml", *keys, "--quiet", "--out", "run"]
    with subprocess.Popen(command, cwd=folder, env=_environment(tree), stdout=subprocess.DEVNULL) as run:
        metrics = folder / "run" / "metrics.jsonl"
        while run.poll() is None and not (metrics.is_file() and metrics.read_text().count("\n") > 6):
            time.sleep(0.02)
        run.send_signal(signal.SIGINT)


def _deployed(tree: Path, folder: Path) -> None:
    _command(tree, folder, "deploy up --dir deployment --nodes 2 --port 8700", "up.log")
    try:
        _command(tree, folder, "deploy run --dir deployment configs/wiretap.toml --quiet --out run", "printed.txt")
    finally:
        _command(tree, folder, "deploy down --dir deployment", "down.log")
        (folder / "configs").unlink()


def compared(before: Path, now: Path) -> Iterator[str]:
    """Each file that differs, with its first lines that do."""
    names = sorted(
        {str(path.relative_to(root)) for root in (before, now) for path in root.rglob("*") if path.is_file()}
    )
    for name in names:
        if _SKIPPED.search(f"/{name}"):
            continue
        if not (before / name).is_file() or not (now / name).is_file():
            yield f"  {name}: only {'now' if (now / name).is_file() else 'before'}"
            continue
        old, new = (_comparable(root / name) for root in (before, now))
        if old != new:
            lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
            shown = [line[:160] for line in lines if not line.startswith(("---", "+++", "@@"))][:8]
            yield "\n    ".join([f"  {name}:", *shown])


def _comparable(path: Path) -> str:
    """A file's content without what differs between two runs of one tree."""
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content.hex()
    if path.suffix == ".json":
        return json.dumps(_without_times(json.loads(text)), indent=1)
    if path.suffix == ".jsonl":
        return "\n".join(json.dumps(_without_times(json.loads(line))) for line in text.splitlines())
    return _SECONDS.sub(lambda found: (found[1] or "") + "TIME", text)


def _without_times(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_times(value) for key, value in tree.items() if not _TIMES & {key, key.split("_")[-1]}}
    return [_without_times(each) for each in tree] if isinstance(tree, list) else tree


if __name__ == "__main__":
    main()
