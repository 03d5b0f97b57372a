"""Every way in which something leaves a client or a server has the noise that the ledger names.

``found`` lists the doors that the code has. Each has a check, or one line that says why nothing of anybody's data goes
through it: a door that is in neither table fails the first test. A check that finds nothing wrong where a door's noise
is taken away is none, so each is played without noise, too.

False alarms: fewer than 80 statistics, each beyond its limits less than once in 5e8 times: less than 2e-7 for the file.
"""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main
from fastapi import FastAPI
from flwr.app import Context, Message

from fedpriv.clients.app import client_app
from fedpriv.core.cli.app import app as command_line
from fedpriv.prompts.masked import prompter_app
from fedpriv.service.http import build_app
from tests.privacy import doors
from tests.privacy.door_checks import CHECKS

UPLOADS = tuple(name for name in CHECKS if name.startswith("upload"))
ANSWERS = tuple(name for name in CHECKS if name.startswith("answers, "))
OWN_APP = tuple(name for name in CHECKS if name.startswith("somebody's app"))

CHECKED: dict[str, tuple[str, ...]] = {
    "client: train.default": (*UPLOADS, "label survey", "noise on the sum, central"),
    "client: train.masked": ("masked upload, gaussian", "masked upload, distributed"),
    "client: train.votes": ("votes, confident", "votes, gnmax", "votes, lnmax"),
    "client: train.masked_votes": ("masked votes",),
    "client with prompts: train.masked_votes": ("masked votes of prompts",),
    "mod: privatise": OWN_APP,
    "route: POST /answers": ANSWERS,
    "command: run": (*UPLOADS, "masked votes", "label survey"),
    "command: sweep": UPLOADS,
    "command: deploy run": ("upload of a deployed client",),
    "command: serve": ANSWERS,
    "command: query": ANSWERS,
    "command: icl": ("answers of prompts", "masked votes of prompts", "synthetic examples"),
    "command: data": ("bounds of a table",),
    **{
        f"mechanism: {name}": (f"upload, {name}, example", f"upload, {name}, update")
        for name in ("gaussian", "hgm", "laplace", "vmf")
    },
    "mechanism: none": ("upload, none",),
    **{f"mechanism: {name}": (f"upload, {name}",) for name in ("percentile", "top-k", "sign", "quantise")},
    "mechanism: central": ("noise on the sum, central", "somebody's app, noise elsewhere"),
    "mechanism: correlated": ("noise on the sum, correlated",),
    "mechanism: distributed": ("masked upload, distributed", "somebody's app, distributed"),
    "mechanism: output": ("model of a client, output", "model of a client, output, laplace"),
    "mechanism: objective": ("model of a client, objective",),
    **{f"aggregator: {name}": (f"votes, {name}",) for name in ("confident", "gnmax", "lnmax")},
    "noise on votes at: server": ("votes, gnmax",),
    "noise on votes at: clients": ("masked votes",),
    "prompts: classify": ("answers of prompts",),
    "prompts: generate": ("synthetic examples",),
    "noise on votes of prompts at: server": ("answers of prompts",),
    "noise on votes of prompts at: clients": ("masked votes of prompts",),
    **{
        f"policy: {name}": (f"answers, {name}",)
        for name in ("label", "label-confidence", "logits", "model", "post-processing", "votes")
    },
    **dict.fromkeys(
        (f"policy: {name}" for name in ("label-only", "none", "paper", "rounded", "top")), ("answers, unproven",)
    ),
    "network: clients/answering.py": (*UPLOADS, "masked votes"),
    "network: clients/app.py": (*UPLOADS, "masked votes"),
    "network: fedpriv/algorithms/pate/client.py": ("votes, gnmax", "masked votes"),
    "network: clients/cohort.py": UPLOADS,
    "network: fedpriv/prompts/masked.py": ("masked votes of prompts",),
    "network: fedpriv/algorithms/secure_aggregation/client.py": (
        "masked upload, gaussian",
        "masked upload, distributed",
    ),
    "network: fedpriv/flower/_privatise.py": OWN_APP,
    "network: fedpriv/flower/secure_sum.py": ("somebody's app, distributed",),
    "network: fedpriv/service/http.py": ANSWERS,
    "network: fedpriv/service/cli.py": ANSWERS,
    "network: server/exchange.py": (*UPLOADS, "noise on the sum, central"),
    "network: fedpriv/algorithms/pate/server.py": ("votes, gnmax", "masked votes"),
    "network: fedpriv/algorithms/secure_aggregation/server.py": (
        "masked upload, gaussian",
        "masked upload, distributed",
    ),
}

_PARTITION = "the number of its partition, which Flower gave it"
_KEYS = "public keys, and encrypted shares of secrets that mask uploads; no example decides any of them"
_READS = "reads a finished run or sweep for the owner of its folder; what it computes is the referee's"
_SETTINGS = "knows settings and no data"
_PROCESSES = "starts, stops or looks at processes"
_FLOWER = "defines how messages are made, moved or read; what is in them is checked where they are answered"

QUIET: dict[str, str] = {
    "client: query.default": _PARTITION,
    **dict.fromkeys((f"client: query.{kind}" for kind in ("keys", "shares", "unmask")), _KEYS),
    **dict.fromkeys((f"client with prompts: query.{kind}" for kind in ("keys", "shares", "unmask")), _KEYS),
    "mod: tap": "passes replies on as they are, and writes to this machine's disk for the app's owner",
    "route: GET /health": "how many answers are left, which is public, and the endpoint's settings",
    **dict.fromkeys(
        (f"route: GET/HEAD /{page}" for page in ("docs", "docs/oauth2-redirect", "openapi.json", "redoc")),
        "describes the routes",
    ),
    **dict.fromkeys((f"command: account {word}" for word in ("compare", "erm", "response", "votes")), _SETTINGS),
    **dict.fromkeys((f"command: config {word}" for word in ("check", "schema", "show")), _SETTINGS),
    **dict.fromkeys(("command: init", "command: attack list", "command: probe list"), _SETTINGS),
    "command: model": "measures a network on random input; of an experiment's data it takes the shape",
    "command: doctor": "versions and devices of this machine, and names of data sets",
    "command: attack tune": "tunes an attack on public images",
    "command: attack train-prior": "trains an image prior on public images",
    "command: flower audit": "runs a copy of somebody's app on their own machine, with what the app itself sends",
    **dict.fromkeys(
        ("network: fedpriv/flower/audit/observers.py", "network: fedpriv/flower/audit/simulation.py"),
        "passes messages and replies on as they are, and writes to this machine's disk for the app's owner",
    ),
    **dict.fromkeys(
        (f"command: {word}" for word in ("attack DIR", "audit", "certify", "compare", "probe DIR", "report")), _READS
    ),
    **dict.fromkeys(
        (
            f"command: deploy {word}"
            for word in ("admit", "down", "gateway", "listen", "prepare", "restart", "status", "up", "warm")
        ),
        _PROCESSES,
    ),
    **dict.fromkeys(
        (f"network: fedpriv/deploy/{word}.py" for word in ("containers", "flower", "folder", "gateway", "launcher")),
        _PROCESSES,
    ),
    **dict.fromkeys(
        (f"network: fedpriv/engines/{word}.py" for word in ("__init__", "inline", "ray")),
        _FLOWER,
    ),
    **dict.fromkeys(
        ("network: clients/memory.py", "network: fedpriv/flower/arrays.py", "network: fedpriv/core/wire.py"), _FLOWER
    ),
    **dict.fromkeys((f"network: server/{word}.py" for word in ("app", "rules/mean", "uploads")), _FLOWER),
    **dict.fromkeys((f"network: fedpriv/flower/{word}.py" for word in ("_tap", "noise")), "see mod: tap"),
    "network: fedpriv/core/algorithm.py": "names types of messages, and sends none",
    "network: fedpriv/deploy/messages.py": "passes on what others have sent",
    **dict.fromkeys(
        ("network: fedpriv/data/torchvision_files.py", "network: attacks/metrics.py"), "downloads, and sends nothing"
    ),
    "network: fedpriv/prompts/remote.py": "sends prompts to the model's endpoint as they are: the ledger says that "
    "anyone who runs the model reads the examples, and an address elsewhere has to be allowed by model.remote",
}


def an_endpoint() -> FastAPI:
    return build_app(SimpleNamespace(), (), {})  # type: ignore[arg-type]


def test_every_door_is_in_one_of_the_tables() -> None:
    known = CHECKED.keys() | QUIET.keys()
    there = doors.found(an_endpoint())
    new, gone = sorted(there - known), sorted(known - there)
    assert new == [], "new doors: give each a check, or say why nothing of anybody's data goes through it"
    assert gone == [], "doors that are gone: remove their rows"
    assert not CHECKED.keys() & QUIET.keys()
    assert set(chain(*CHECKED.values())) == CHECKS.keys()


def test_a_new_door_is_found(tmp_path: Path) -> None:
    """A handler, a route, a command, and a module that opens connections."""
    app, endpoint = client_app(None), an_endpoint()

    @app.query("statistics")
    def statistics(message: Message, context: Context) -> Message:
        return message

    @endpoint.get("/statistics")
    def shown() -> None: ...

    other = typer.Typer()
    other.add_typer(command_line, name="old")
    other.command("publish")(lambda: None)
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "statistics.py").write_text("def send():\n    from urllib.request import urlopen\n")
    assert "query.statistics" in doors.handlers(app)
    assert "GET /statistics" in set(doors.routes(endpoint))
    assert "publish" in set(doors.verbs(typer.main.get_command(other)))
    assert set(doors.network_modules(tmp_path)) == {"server/statistics.py"}


@pytest.mark.parametrize("name", CHECKS)
def test_what_leaves_has_the_noise_that_the_ledger_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHECKS[name].play(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", [name for name, check in CHECKS.items() if check.mute])
def test_a_door_without_its_noise_is_found_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = CHECKS[name]
    assert check.mute is not None
    check.mute(monkeypatch)
    with pytest.raises(AssertionError):
        check.play(tmp_path, monkeypatch)


@pytest.mark.parametrize("make", [lambda: client_app(None), lambda: prompter_app(doors.PROMPTER)])
def test_what_is_said_to_carry_no_data_reaches_none(make: Any) -> None:
    """These handlers are functions of a message and of what Flower keeps: they build no world and close over none."""
    app = make()
    for kind, handler in vars(app)["_registered_funcs"].items():
        if not {f"client: {kind}", f"client with prompts: {kind}"} & QUIET.keys():
            continue
        assert handler.__closure__ is None
        assert not {name for name in handler.__code__.co_names if "world" in name or "kept_for" in name}
