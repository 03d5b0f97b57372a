"""The commands ``fedpriv serve DIR`` and ``fedpriv query DIR``, and an endpoint's audit for ``fedpriv audit DIR``."""

import math
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typing_extensions import override

from fedpriv.attacks.commands import Audit
from fedpriv.core.cli.terminal import (
    Json,
    Quiet,
    Run,
    Set,
    err,
    out,
    print_json,
    print_line,
    print_sentences,
    shown,
    table_of,
)
from fedpriv.core.config import load_run
from fedpriv.core.errors import InputError, cut, optional, printable
from fedpriv.core.registry import OPTIONS
from fedpriv.core.verb import Verb
from fedpriv.service.settings import ServiceConfig

if TYPE_CHECKING:
    from torch import Tensor

    from fedpriv.attacks.questions import Answers
    from fedpriv.core.figure import Figure
    from fedpriv.core.progress import Progress
    from fedpriv.core.runs import RunFolder
    from fedpriv.service.endpoint import Served
    from fedpriv.service.records import AnswersAudit

_ADDRESS = "127.0.0.1"
_ASKED = 10  # test images, unless others are named
_SHOWN = 20  # rows of a table
_NUMBER = re.compile(r"[0-9]{1,9}")  # str.isdigit would let through what int refuses


def serve(
    folder: Run,
    set_: Set = None,
    port: Annotated[
        int, typer.Option(metavar="N", min=1, max=65535, help="Port on this machine only (127.0.0.1).")
    ] = 8700,
    status: Annotated[
        bool, typer.Option("--status", help="Show the endpoint and how much of its budget is used; serve nothing.")
    ] = False,
    user: Annotated[
        str | None,
        typer.Option(metavar="NAME=N", help="Make a key for a user with N answers, print it, serve nothing."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Serve the final model in DIR over HTTP, with an answer policy and a budget that is kept across restarts."""
    config, new = _config(folder, set_), None if user is None else _new_user(user)
    uvicorn: Any = None if status or new else _server()
    from fedpriv.service.records import made_service, users

    if status and config is None:
        _print_status(folder, as_json)
        return
    from fedpriv.core.report import reported
    from fedpriv.core.runs import RunFolder
    from fedpriv.service.opening import add_user, open_service

    run = RunFolder.open(folder)
    with shown(quiet or as_json) as progress, reported(folder):
        served = open_service(run, config, progress)
    if new is not None:
        name, most = new
        print_line(add_user(run, name, most))
        told = f"key of {name}, {most} answers, shown once; start the server with fedpriv serve {folder}"
        err.print(told, style="dim", markup=False, soft_wrap=True)
        return
    if status:
        _print_status(folder, as_json)
        return
    from fedpriv.service.http import build_app

    facts = made_service(folder)
    about = {"method": facts.method, "answers": facts.answers, "classes": facts.classes, "shape": list(facts.shape)}
    server = uvicorn.Config(build_app(served, users(folder), about), log_level="warning", access_log=False)
    # Bound here, so that a port that is taken is one line before anything is served.
    with _listening(port) as listener:
        address = f"http://{_ADDRESS}:{port}"
        print_line(f"Answers by {facts.method} at {address}/answers; described at {address}/docs")
        uvicorn.Server(server).run(sockets=[listener])


def _server() -> Any:
    """The libraries of the server, which asking without one does not need."""
    optional("fastapi", "service", "fedpriv serve")
    return optional("uvicorn", "service", "fedpriv serve")


def query(
    folder: Run,
    test: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Ask about these test images, B not included; default: the first 10."),
    ] = None,
    npz: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Ask about the array named images in this .npz file.")
    ] = None,
    set_: Set = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Ask the endpoint of DIR without a server; the same query ledger is charged."""
    if test is not None and npz is not None:
        raise InputError("--test A:B and --npz FILE are two sets of images; give one of them")
    config = _config(folder, set_)
    from fedpriv.core.report import reported
    from fedpriv.core.runs import RunFolder
    from fedpriv.service.opening import open_service

    run = RunFolder.open(folder)
    images, truth, names = _test_images(run, test) if npz is None else (_own_images(npz), None, ())
    with shown(quiet or as_json) as progress, reported(folder):
        served = open_service(run, config, progress)
    before = served.asked
    answers = served.ask(images)
    charged = served.asked - before
    if as_json:
        _print_json_answers(answers, truth, charged, served, folder)
    else:
        _print_answers(answers, truth, names, charged, served)


def _right(answers: "Answers", truth: "Tensor") -> int:
    return int((answers.labels == truth.numpy()).sum())


def _print_json_answers(
    answers: "Answers", truth: "Tensor | None", charged: int, served: "Served", folder: Path
) -> None:
    given = answers.probabilities
    # JSON has no NaN: what a policy hides of an answer is null.
    rows = given if given is None else [[None if math.isnan(p) else float(p) for p in row] for row in given]
    print_json(
        {
            "labels": answers.labels.tolist(),
            "probabilities": rows,
            "charged": charged,
            "left": served.ledger.answers - served.asked,
            # For the folder's owner alone: a server never looks at labels.
            **({} if truth is None else {"truth": truth.tolist(), "right": _right(answers, truth)}),
            "folder": str(folder),
        }
    )


def _print_answers(
    answers: "Answers", truth: "Tensor | None", names: tuple[str, ...], charged: int, served: "Served"
) -> None:
    def called(label: int) -> str:
        return cut(printable(names[label])) if names else str(label)

    given, labels = answers.probabilities, answers.labels[:_SHOWN]
    columns = {"image": [str(at) for at in range(len(labels))], "answer": [called(label) for label in labels]}
    if given is not None:
        columns["probability"] = [f"{given[at, label]:.4g}" for at, label in enumerate(labels)]
    if truth is not None:
        columns["truth"] = [called(label) for label in truth[:_SHOWN].tolist()]
    out.print(table_of(columns, zip(*columns.values(), strict=True), words=0))
    more = f" (the first {_SHOWN} are shown)" if len(answers.labels) > _SHOWN else ""
    budget = served.ledger.answers
    left = budget - served.asked
    asked = len(answers.labels)
    right = [] if truth is None else [f"{_right(answers, truth)} of {asked} right."]
    print_sentences([*right, f"{asked} answered{more}, {charged} charged; {left} of {budget} answers are left."])


def _new_user(text: str) -> tuple[str, int]:
    """Name and answers of --user."""
    name, _, answers = text.partition("=")
    if not _NUMBER.fullmatch(answers):
        raise InputError(key="--user", given=text, allowed="expected NAME=N, such as ann=100")
    return name, int(answers)


def _listening(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((_ADDRESS, port))
    except OSError as error:
        listener.close()
        raise InputError(
            key="--port", given=port, allowed=error.strerror or str(error), hint="choose another"
        ) from None
    return listener


def _config(folder: Path, overrides: list[str] | None) -> ServiceConfig | None:
    """What --set asks for; ``None``: what the folder says."""
    for text in overrides or ():
        if not text.partition("=")[0].strip().startswith("service."):
            raise InputError(
                key="--set",
                given=text,
                allowed="an endpoint is made by keys of [service], such as service.method=label",
            )
    return ServiceConfig.of(load_run(folder, overrides)) if overrides and (folder / "config.toml").is_file() else None


def _print_status(folder: Path, as_json: bool) -> None:
    from fedpriv.service.records import made_service, query_ledger, users

    facts, known = made_service(folder), users(folder)
    ledger = query_ledger(folder, facts)
    if as_json:
        print_json(
            {
                **facts.model_dump(mode="json"),
                "used": ledger.used,
                "users": [
                    {"name": user.name, "used": ledger.used_by(user.name), "answers": user.answers} for user in known
                ],
            }
        )
        return
    proven = facts.guarantee
    claim = (
        f"Proven of all {facts.answers} together: epsilon {proven.epsilon:.4g} at delta {proven.delta:g}; "
        f"{proven.adjacency}."
        if proven.epsilon is not None
        else f"Nothing is proven: {proven.theorem['epsilon']}."
    )
    people = [f"{user.name}: {ledger.used_by(user.name)} of {user.answers}." for user in known]
    print_sentences(
        [f"Method {facts.method} ({facts.title}): {ledger.used} of {facts.answers} answers are used.", claim, *people]
    )


def _test_images(run: "RunFolder", text: str | None) -> "tuple[Tensor, Tensor, tuple[str, ...]]":
    """These test images, their labels and the classes' names; the first ones where none are named."""
    from fedpriv.data.datasets import load_dataset

    experiment = run.experiment()
    dataset = load_dataset(experiment.data, experiment.seed)
    images = dataset.x_test
    if text is None:
        return images[:_ASKED], dataset.y_test[:_ASKED], dataset.class_names
    first, _, last = text.partition(":")
    if not (_NUMBER.fullmatch(first) and _NUMBER.fullmatch(last)) or not int(first) < int(last) <= len(images):
        raise InputError(key="--test", given=text, allowed=f"expected A:B with 0 <= A < B <= {len(images)}")
    rows = slice(int(first), int(last))
    return images[rows], dataset.y_test[rows], dataset.class_names


def _own_images(path: Path) -> "Tensor":
    import torch

    from fedpriv.core.npz import read_arrays, require_headers
    from fedpriv.data.files import channels_are_last

    array = read_arrays(path, require_headers(path, ["images"]))["images"]
    if array.dtype.name not in ("uint8", "float32", "float64"):
        raise InputError(f"{path}: images of {array.dtype}; expected uint8, or float32 or float64 on [0, 1]")
    images = torch.from_numpy(array)
    if images.ndim == 3:  # these and channels at the end are what training reads, too
        return images[:, None]
    is_last = images.ndim == 4 and images.shape[1] not in (1, 3) and channels_are_last(images.shape)
    return images.movedim(-1, 1) if is_last else images


@OPTIONS.register
@dataclass(frozen=True, eq=False)
class AnswersAuditing(Audit["AnswersAudit"]):
    """An audit of the run's endpoint."""

    name: ClassVar[str] = "answers"
    rank: ClassVar[int] = 30

    answers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Audit DIR's endpoint instead, with N training examples replaced."),
    ] = None

    @override
    def suits(self, run: "RunFolder") -> bool:
        return self.answers is not None

    @override
    def made(self, run: "RunFolder", progress: "Progress") -> "AnswersAudit":
        from fedpriv.service.audit import audit_answers

        return audit_answers(run, self.answers or 1, progress)

    @override
    def facts(self, found: "AnswersAudit") -> list[tuple[str, str]]:
        from fedpriv.service.report import audited

        return audited(found)

    @override
    def figures(self, found: "AnswersAudit") -> "tuple[Figure, ...]":
        return found.figures if found.proven else ()


VERBS = (
    Verb(
        "serve",
        serve,
        place=60,
        epilog="Examples:\n\n  fedpriv serve runs/quickstart-20260101-120000 --set service.method=rounded:2\n\n"
        "  fedpriv serve runs/quickstart-20260101-120000 --status",
    ),
    Verb("query", query, place=80, epilog="Example:\n\n  fedpriv query runs/quickstart-20260101-120000 --test 0:10"),
)
