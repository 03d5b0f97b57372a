"""Nothing that came over the wire or from disk is unpickled: a pickle is a program.

Ray moves objects between its own processes by pickle; these are this machine's, or the cluster that the user names.
CIFAR's batches are pickles: torchvision reads them after it has compared their digests with those in its own source.
"""

import ast
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord

import fedpriv
from fedpriv.attacks import metrics
from fedpriv.attacks.observation import list_observations, read_observation
from fedpriv.core.errors import InputError
from fedpriv.core.lab import attack_run, resume_run, start_run
from fedpriv.core.progress import Silent
from fedpriv.core.runs import RunFolder
from fedpriv.core.wire import unpack
from fedpriv.data.files import read_npz
from tests.integration.small import experiment

HOME = Path(fedpriv.__file__).parents[1]
ROOMS = ("fedpriv", "clients", "server", "attacks", "benchmarks")
# Modules that unpickle, or run what they read.
FORBIDDEN = {"cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Pickles messages of its own, to measure them.
MEASURED = "benchmarks/scale.py"
# The other one has the name of an exception, which torch.load raises.
ALLOWED = {("attacks/metrics.py", "pickle"), (MEASURED, "pickle")}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for room in ROOMS:
        for path in sorted((HOME / room).rglob("*.py")):
            yield path.relative_to(HOME).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.Module) -> set[str]:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def calls(tree: ast.Module) -> Iterator[tuple[str, dict[str, object]]]:
    """Calls of a function of a module, as module.function, with the keywords that are constants."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            constants = {key.arg: key.value.value for key in node.keywords if isinstance(key.value, ast.Constant)}
            yield f"{node.func.value.id}.{node.func.attr}", {str(key): value for key, value in constants.items()}


def test_the_source_unpickles_nothing() -> None:
    seen = set()
    for name, tree in sources():
        assert not {module.partition(".")[0] for module in imported(tree)} & FORBIDDEN, name
        if "pickle" in imported(tree):
            assert (name, "pickle") in ALLOWED, name
        for function, constants in calls(tree):
            assert not function.startswith("pickle.") or name == MEASURED, name
            if function == "torch.load":
                assert constants.get("weights_only") is True, name
            if function in ("np.load", "numpy.load"):
                assert constants.get("allow_pickle") is False, name
            seen.add(function)
    assert {"torch.load", "np.load"} <= seen


def test_a_whole_run_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **keywords: object) -> object:
        raise AssertionError("something is unpickled")

    settings = experiment(adversary={"attacks": ["iga"], "victims": 1, "iga": {"iterations": 2}})
    start_run(settings, tmp_path / "first", "", Silent())  # libraries make classes of the Unpickler when they load
    for name in ("load", "loads", "Unpickler", "_load", "_loads", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    start_run(settings, tmp_path / "run", "", Silent())
    assert resume_run(tmp_path / "run", Silent()).status == "completed"
    overrides = ["adversary.iga.iterations=3"]
    assert attack_run(tmp_path / "run", ["iga"], [], overrides, None, "", Silent()).status == "completed"


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.path,)


@pytest.fixture
def fuse(tmp_path: Path) -> Path:
    return tmp_path / "exploded"


def test_the_bomb_works(fuse: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(fuse)))
    assert fuse.exists()


def npz(path: Path, fuse: Path, *names: str) -> Path:
    np.savez(path, allow_pickle=True, **{name: np.array([Bomb(fuse)], dtype=object) for name in names})
    return path


def test_pickles_in_files_are_not_run(tmp_path: Path, fuse: Path) -> None:
    with pytest.raises(InputError):
        read_npz(npz(tmp_path / "data.npz", fuse, "x_train", "y_train", "x_test", "y_test"), memory=1)
    folder = RunFolder.create(tmp_path / "run", experiment())
    torch.save({"a": Bomb(fuse)}, folder.path / "checkpoint" / "server.safetensors")
    with pytest.raises(InputError, match="damaged"):
        folder.load_checkpoint()
    settings = experiment(adversary={"attacks": ["iga"], "victims": 1, "iga": {"iterations": 1}})
    start_run(settings, tmp_path / "heard", "", Silent())
    (heard,) = list_observations(tmp_path / "heard" / "observations")
    torch.save({"a": Bomb(fuse)}, heard)
    with pytest.raises(InputError, match="damaged"):
        read_observation(heard)
    assert not fuse.exists()


def test_pickles_in_uploads_are_not_run(tmp_path: Path, fuse: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([Bomb(fuse)], dtype=object), allow_pickle=True)
    for content in ((tmp_path / "a.npy").read_bytes(), pickle.dumps(Bomb(fuse))):
        for kind in ("object", "float32"):
            with pytest.raises(ValueError, match=r"^an array "):
                unpack(ArrayRecord({"a": Array(kind, (1,), "numpy.ndarray", content)}))
    assert not fuse.exists()


def test_pickles_in_place_of_weights_are_not_run(tmp_path: Path, fuse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.models import SqueezeNet1_1_Weights

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    weights = tmp_path / "checkpoints" / SqueezeNet1_1_Weights.IMAGENET1K_V1.url.rpartition("/")[2]
    weights.parent.mkdir()
    torch.save(Bomb(fuse), weights)
    metrics._lpips_network.cache_clear()
    x = torch.zeros(1, 3, 64, 64)
    reason = metrics.lpips_scores(x, x, download=False).reason
    metrics._lpips_network.cache_clear()
    assert reason is not None
    assert "cannot be read" in reason
    assert not fuse.exists()
