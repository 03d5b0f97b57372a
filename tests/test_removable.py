"""A capability is one folder: without it, its tests, page and configs, everything else still works."""

import os
import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

from tests.rooms import CAPABILITIES, ROOT

REMOVABLE = [name for name in CAPABILITIES if name not in ("evasion", "own model", "secure aggregation")]

# One process for all trees, which has imported what is slow; each tree is tried in a child of it.
SCRIPT = """
import os, sys
import flwr.serverapp, lpips, matplotlib.figure, scipy.stats, sklearn.datasets, torchmetrics.functional.image
def run(*words):
    sys.argv = ["fedpriv", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
for tree in sys.argv[1:]:
    child = os.fork()
    if not child:
        os.chdir(tree)
        sys.path.insert(0, tree)
        from fedpriv.core.cli import main
        run("--help")
        run("config", "schema")
        run("config", "check", "configs/quickstart.toml")
        run("run", "configs/quickstart.toml", "--quiet", "--out", "run", KEYS)
        os._exit(0)
    os.waitpid(child, 0)
"""
ATTACKS = ("dlg", "iga", "map")
SMALL = ("federation.rounds=20", "adversary.victims=1", *(f"adversary.{name}.iterations=20" for name in ATTACKS))


def without(capability: str, tree: Path) -> Path:
    """Copy the tree without one capability's folder."""
    folder = CAPABILITIES[capability].folder
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    # What Python has compiled is valid for copies, which have the same times.
    compiled = [cache_from_source(name) for name in listed if name.endswith(".py")]
    for name in (*listed, *compiled):
        if not name.startswith((f"{folder}/", "tests/", "docs/", "studies/")) and (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    return tree


def test_everything_else_works_without_any_one_capability(tmp_path: Path) -> None:
    trees = {name: without(name, tmp_path / name) for name in REMOVABLE}
    script = SCRIPT.replace("KEYS", ", ".join(f"'--set', '{key}'" for key in SMALL))
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, trees.values())], cwd=tmp_path, capture_output=True, text=True
    )
    broken = [name for name, tree in trees.items() if not (tree / "run" / "report.html").is_file()]
    assert broken == [], done.stderr
    linter = Path(sys.executable).with_name("lint-imports")
    for name, tree in trees.items():
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        linted = subprocess.run([linter, "--no-cache"], cwd=tree, env=environment, capture_output=True, text=True)
        assert linted.returncode == 0, (name, linted.stdout)
