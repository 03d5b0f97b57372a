"""The script for a GPU does all its parts on a CPU, in its tiny mode, and names what fails."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from tests.command_line import fedpriv


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, dict[str, object]]:
    kept = tmp_path / "rows.json"
    monkeypatch.setattr("sys.argv", ["benchmarks.gpu", "--tiny", "--json", str(kept), *arguments])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    return int(end.value.code or 0), json.loads(kept.read_text())


def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(setup: gpu.Setup) -> list[gpu.Row]:
        raise RuntimeError("no memory\nleft")

    def whole(setup: gpu.Setup) -> list[gpu.Row]:
        return [{"case": "c", "way": "w", "value": None, "unit": "s"}]

    monkeypatch.setattr(gpu, "PARTS", {"broken": broken, "whole": whole})
    code, kept = run(tmp_path, monkeypatch)
    assert (code, kept["failed"]) == (1, {"broken": "RuntimeError: no memory left"})
    assert kept["rows"] == [{"part": "whole", "case": "c", "way": "w", "value": None, "unit": "s"}]


def forked(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """Commands of the program, without the seconds of their imports."""
    assert command[1:3] == ["-m", "fedpriv"]
    return fedpriv(*command[3:], cwd=gpu.ROOT)


# With Ray's nodes, since Ray takes a minute to start four clients: make ray-test.
PARTS = [
    pytest.param(part, marks=pytest.mark.skipif("FEDPRIV_RAY_NODES" not in os.environ, reason="make ray-test"))
    if part == "ray"
    else part
    for part in gpu.PARTS
]


@pytest.mark.parametrize("part", PARTS)
def test_each_part_measures_on_a_cpu(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", forked)
    code, kept = run(tmp_path, monkeypatch, "--parts", part, "--seconds", "500")
    assert (code, kept["failed"]) == (0, {})
    rows = kept["rows"]
    assert isinstance(rows, list)
    assert len(rows) > 1
    assert all(row["value"] > 0 for row in rows), rows
