"""A capability is one folder: without it, its tests, page and configs, everything else still works."""

import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

from tests.rooms import CAPABILITIES, ROOT

REMOVABLE = [name for name in CAPABILITIES if name not in ("evasion", "own model", "secure aggregation")]

# One process, which has imported and drawn what is slow; children of it try what is left without each folder in turn.
SCRIPT = """
import io, os, subprocess, sys
from pathlib import Path
import dp_accounting, flwr.clientapp, flwr.serverapp, lpips, pyarrow, randomgen
import scipy.ndimage, scipy.stats, sklearn.datasets
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


def copied(tree: Path) -> Path:
    """Copy what a capability may be taken out of."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    # What Python has compiled is valid for copies, which have the same times.
    compiled = [cache_from_source(name) for name in listed if name.endswith(".py")]
    for name in (*listed, *compiled):
        if not name.startswith(("tests/", "docs/", "studies/")) and (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    return tree


def test_everything_else_works_without_any_one_capability(tmp_path: Path) -> None:
    tree, linter = copied(tmp_path / "tree"), Path(sys.executable).with_name("lint-imports")
    folders = [CAPABILITIES[name].folder for name in REMOVABLE]
    script = SCRIPT.replace("KEYS", ", ".join(f"'--set', {key!r}" for key in SMALL))
    command = [sys.executable, "-c", script, str(tree), str(linter), *folders]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    broken = [folder for folder in folders if not (tmp_path / "without" / folder / "report.html").is_file()]
    assert (len(folders), broken) == (len(REMOVABLE), [])
