"""A capability is one folder: without it, its tests, page and configs, everything else still works."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clone import copied
from tests.rooms import CAPABILITIES

REMOVABLE = [name for name in CAPABILITIES if name not in ("evasion", "own model", "secure aggregation")]

# One process, which has imported and drawn what is slow; children of it try what is left without each folder in turn.
SCRIPT = """
import io, os, subprocess, sys
from pathlib import Path
import cryptography.x509, dp_accounting, flwr.clientapp, flwr.serverapp, jinja2, lpips, pyarrow, pydantic.json_schema
import randomgen, rich.columns, rich.markdown, rich.traceback, safetensors.torch, scipy.ndimage, scipy.stats
import sklearn.datasets, tomli_w, typer
from matplotlib.figure import Figure
figure = Figure()
figure.subplots().semilogy([1, 2], label="letters")
figure.savefig(io.BytesIO(), format="svg")
def run(*words):
    sys.argv = ["fedpriv", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
tree, linter, *folders = sys.argv[1:]
os.chdir(tree)
sys.path.insert(0, tree)
for folder in folders:
    os.rename(folder, "../removed")
    child = os.fork()
    if not child:
        from fedpriv.core.cli import main
        run("--help")
        run("config", "schema")
        run("account", "votes", "--sigma", "40", "--answers", "9")
        run("config", "check", "configs/quickstart.toml")
        run("run", "configs/quickstart.toml", "--quiet", "--out", f"../without/{folder}", KEYS)
        done = subprocess.run([linter, "--no-cache"], env={**os.environ, "PYTHONPATH": tree}, stdout=sys.stderr)
        os._exit(done.returncode)
    _, status = os.waitpid(child, 0)
    os.rename("../removed", folder)
    assert status == 0, folder
"""
SMALL = (
    "federation.rounds=20",
    "federation.clients=2",
    "adversary.victims=1",
    "adversary.attacks=['iga']",
    "adversary.iga.iterations=5",
)


@pytest.mark.long
def test_everything_else_works_without_any_one_capability(tmp_path: Path) -> None:
    tree, linter = (
        copied(tmp_path / "tree", "tests/", "docs/", "studies/"),
        Path(sys.executable).with_name("lint-imports"),
    )
    folders = [CAPABILITIES[name].folder for name in REMOVABLE]
    script = SCRIPT.replace("KEYS", ", ".join(f"'--set', {key!r}" for key in SMALL))
    command = [sys.executable, "-c", script, str(tree), str(linter), *folders]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    broken = [folder for folder in folders if not (tmp_path / "without" / folder / "report.html").is_file()]
    assert (len(folders), broken) == (len(REMOVABLE), [])
