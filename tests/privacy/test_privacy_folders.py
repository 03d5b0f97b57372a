"""Folders that hold a budget are the same wherever a process starts, so that no restart gives one back.

Every environment variable that names a folder, every path among the settings, and every relative path that the code
begins with is in a table below: with a budget in it, it is absolute, or it is one with what is released.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedpriv.clients.memory import secret_for
from fedpriv.core.errors import RefusedError
from fedpriv.core.randomness import Secret
from fedpriv.core.seeds import MEMORY
from fedpriv.deploy import flower
from fedpriv.deploy.folder import DeploymentFolder
from fedpriv.flower.app_settings import FlowerSettings
from fedpriv.service.endpoint import Oracle, Served
from fedpriv.service.ledger import Opening, QueryLedger
from fedpriv.service.policies import Facts
from tests.service.named import named_policy

ROOT = Path(__file__).parents[2]
_OWN = "one run with its own ledger lies in it; another folder is another run, and no budget is shared"

VARIABLES = {
    "FEDPRIV_MEMORY": "budget: what a deployed client has answered in each round; absolute, or nothing is answered",
    "FEDPRIV_RUNS": _OWN,
    "FEDPRIV_SEEDS": "no budget: where nothing is found, nothing is answered",
    "FEDPRIV_DATA": "no budget: data sets",
    **dict.fromkeys(("FEDPRIV_GID", "FEDPRIV_NODES", "FEDPRIV_UID"), "no folder: a number of the compose file"),
    "FEDPRIV_CACHE": "no budget: pictures that were read, by the content of their files",
}
SETTINGS = {
    "privatise.folder": "budget: a client's ledger over all runs; absolute, and without it nothing is released",
    "tap.folder": "no budget: what a tap writes down for the app's owner",
}
RELATIVE = {
    ("fedpriv/core/cli/terminal.py", "runs"): _OWN,
    ("server/app.py", "runs"): _OWN,
    ("fedpriv/sweep/cli.py", "sweeps"): "runs with ledgers of their own lie in it",
    ("fedpriv/core/cli/terminal.py", "sweeps"): "no budget: reports are written and compared",
    (
        "fedpriv/deploy/cli.py",
        "deployment",
    ): "clients' memories of runs of this deployment alone; processes that it starts are told absolute paths",
    ("fedpriv/deploy/cli.py", "heard"): "no budget: what an eavesdropper stores",
    ("fedpriv/sweep/cli.py", "comparison.html"): "no budget: a report",
    ("fedpriv/deploy/cli.py", "keys"): "no budget: certificates and keys",
    ("fedpriv/deploy/cli.py", "keys/admission"): "no budget: public keys",
    ("fedpriv/deploy/cli.py", "keys/gateway"): "no budget: certificates and keys",
    ("fedpriv/flower/app_settings.py", "runs"): "see tap.folder",
    ("fedpriv/models/machinery/settings.py", "data"): "no budget: data sets and models",
}
# The query ledger (DIR/service/charges.jsonl) and the counts and votes of fedpriv icl (DIR/private) lie in the folder
# of the run, beside the model or the answers that they are about: whoever has no such folder has nothing to ask.


def sources() -> Iterator[Path]:
    for package in ("fedpriv", "clients", "server"):
        files = sorted((ROOT / package).rglob("*.py"))
        yield from (path for path in files if not any(folder.is_symlink() for folder in path.parents))


def relative_paths(text: str) -> Iterator[str]:
    """Relative folders that the code begins with: Path("...") and what stands in for an environment variable."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[-1], ast.Constant):
            value, name = node.args[-1].value, ast.unparse(node.func)
            begins = len(node.args) == {"Path": 1, "os.environ.get": 2}.get(name)
            if begins and isinstance(value, str) and re.search("[a-z]", value) and not Path(value).is_absolute():
                yield value


def test_every_folder_is_in_a_table() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sources()}
    named = {name for text in texts.values() for name in re.findall(r"\bFEDPRIV_[A-Z]+\b", text)}
    assert named == VARIABLES.keys()
    told = {
        (name, value)
        for name, text in texts.items()
        if "environ" in text or "Path(" in text
        for value in relative_paths(text)
    }
    assert told == RELATIVE.keys()
    found = {
        f"{section}.{key}"
        for section, field in FlowerSettings.model_fields.items()
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ()))
        for key, own in getattr(kind, "model_fields", {}).items()
        if "Path" in str(own.annotation)
    }
    assert found == SETTINGS.keys()


def test_a_new_folder_is_found() -> None:
    text = 'ledger = Path("budget")\nother = os.environ.get("FEDPRIV_LEDGER", "ledgers")\nfine = Path("/var/lib/x")\n'
    assert list(relative_paths(text)) == ["budget", "ledgers"]


@pytest.mark.parametrize("folder", ["memory", "./memory", "~/memory", "/no/disk/memory"])
def test_a_client_without_one_memory_answers_nothing(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart elsewhere would find no memory, and answer a round once more with other noise."""
    (tmp_path / "memory").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MEMORY, folder)
    own = Context(run_id=7, node_id=1, node_config={"partition-id": 0}, state=RecordDict(), run_config={})
    with pytest.raises(RefusedError, match="FEDPRIV_MEMORY does not name a folder on this"):
        secret_for(own, 1, bytes(32), None)
    assert not list((tmp_path / "memory").iterdir())


def test_a_deployment_tells_its_processes_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = flower.environment(DeploymentFolder(Path("deployment")))
    assert told[MEMORY] == str(tmp_path / "deployment" / "clients")
    assert {Path(told[name]).is_absolute() for name in VARIABLES.keys() & told.keys() if told[name]} == {True}


def test_a_query_ledger_is_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def served(folder: Path) -> Served:
        policy, secret = named_policy("none"), Secret.of_seed(0)
        oracle = Oracle(policy, Facts(2), (1, 1, 1), lambda images: np.zeros((len(images), 2)), 0.0, secret)
        return Served(oracle, QueryLedger(folder / "charges.jsonl", Opening("ab" * 32, 2), {}), None)

    (tmp_path / "run" / "elsewhere").mkdir(parents=True)
    for cwd, folder in ((tmp_path, Path("run")), (tmp_path / "run" / "elsewhere", Path(".."))):
        monkeypatch.chdir(cwd)
        served(folder).ask(torch.zeros(1, 1, 1, 1))
    assert served(tmp_path / "run").asked == 2
