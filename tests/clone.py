"""What a clone of the repository has, in another folder."""

import shutil
import subprocess
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def copied(tree: Path, *left_out: str) -> Path:
    """Copy the files that git lists, apart from folders that are named with a slash at their end."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    # What Python has compiled is valid for copies, which have the same times.
    compiled = [cache_from_source(name) for name in listed if name.endswith(".py")]
    for name in (*listed, *compiled):
        if not name.startswith(left_out) and (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    return tree
