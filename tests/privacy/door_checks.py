"""What is checked at each door: what leaves there has the noise that the ledger names, and no less.

A check lets something out by the code's own path on a tiny configuration, takes off what would have left without noise
(computed here: by autograd, by counting, or by the same path with next to no noise), and compares the rest with the law
of the ledger's noise. Its ``mute`` takes the noise away where the door adds it, and the check must fail then.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from numpy.typing import NDArray
from scipy import stats
from starlette.testclient import TestClient
from torch.nn.functional import cross_entropy

import fedpriv.algorithms.labels.preparation
import fedpriv.algorithms.pate.client
import fedpriv.algorithms.pate.server
import fedpriv.algorithms.secure_aggregation.client
import fedpriv.core.world
import fedpriv.data.bounds
import fedpriv.data.sets.csv
import fedpriv.engines.inline
import fedpriv.flower.secure_sum
import fedpriv.mechanisms.machinery.whole_numbers
import fedpriv.prompts.classify
import fedpriv.prompts.generate
import fedpriv.prompts.masked
import fedpriv.server.rounds
from fedpriv.accounting.convex_models import objective_terms
from fedpriv.algorithms.erm.training import bounded_features, client_problem, feature_length
from fedpriv.algorithms.pate.records import Poll
from fedpriv.algorithms.pate.settings import PateConfig
from fedpriv.algorithms.pate.teachers import questions
from fedpriv.clients.app import app as deployed_app
from fedpriv.core.config import Experiment
from fedpriv.core.errors import InputError
from fedpriv.core.lab import start_run
from fedpriv.core.plan import Plan
from fedpriv.core.progress import Silent
from fedpriv.core.randomness import Secret
from fedpriv.core.registry import MECHANISMS
from fedpriv.core.runs import RunFolder
from fedpriv.core.seeds import MEMORY
from fedpriv.core.wire import unpack
from fedpriv.core.world import State, World, build_world
from fedpriv.engines.inline import simulated
from fedpriv.flower import privatise
from fedpriv.mechanisms.central import CentralFamily
from fedpriv.mechanisms.model_noise import spread_noise
from fedpriv.prompts.language import Counting
from fedpriv.prompts.run import start_icl
from fedpriv.server.exchange import question
from fedpriv.service.answer_sources import made_source
from fedpriv.service.http import build_app
from fedpriv.service.opening import open_service
from fedpriv.service.policies import POLICIES, Draws
from fedpriv.service.records import Service
from fedpriv.service.settings import ServiceConfig
from tests.flower import apps
from tests.flower.secure_sums import summed
from tests.privacy import doors
from tests.privacy.game import Examples

__all__ = ["CHECKS", "Check"]

Floats = NDArray[np.float64]
Patch = pytest.MonkeyPatch

CLIENTS, CLIP, RATE = 3, 0.5, 1.0
"""Three clients of one example each; a step of FedSGD moves the model by minus the mean of their uploads."""

BASE: dict[str, Any] = {
    "model": {"name": "tests.privacy.networks:heads"},
    "training": {"batch_size": 1, "learning_rate": RATE},
    "federation": {"clients": CLIENTS, "rounds": 2},
    "adversary": {"attacks": [], "best_decision": False},
    "engine": {"name": "inline", "device": "cpu", "threads": 1},
}
SIDE = 30


@dataclass(frozen=True)
class Check:
    """A door's check."""

    play: Callable[[Path, Patch], None]  # lets something out and looks at it, in a folder of its own
    # takes the door's noise away; `None`: the door adds none, and its ledger claims none
    mute: Callable[[Patch], None] | None


def without_noise_on_counts(patch: Patch) -> None:
    for kind in ("NoisyMax", "ConfidentMax", "LaplaceMax"):
        patch.setattr(
            f"fedpriv.accounting.aggregators.{kind}.decide", lambda own, counts, generator: int(np.argmax(counts))
        )


# ---- rounds: what clients send, and what the server sends on --------------------------------------------------------


def examples(side: int = SIDE, count: int = CLIENTS, labels: int = 2) -> Examples:
    """Random images, as many of each label."""
    images = np.random.default_rng(1).integers(0, 256, (count, side, side), dtype=np.uint8)
    return Examples(images, np.arange(count) % labels)


def settings(mechanism: Mapping[str, Any], **sections: Mapping[str, Any]) -> Experiment:
    tree = {**BASE, "mechanism": dict(mechanism)}
    tree |= {key: {**tree.get(key, {}), **own} for key, own in sections.items()}
    return Experiment.model_validate({"data": {"name": "npz", "path": examples().path}, **tree})


@dataclass(frozen=True)
class Sent:
    """A message to a client, and its reply."""

    client: int  # the partition's number
    message: Message  # what the server sent
    reply: Message  # what the client sent


@dataclass(frozen=True)
class Ran:
    """A whole run, and all that went over its wire."""

    world: World
    ledger: Mapping[str, Any]
    sent: list[Sent]

    def of_kind(self, kind: str, round_number: int) -> list[Sent]:
        chosen = (one for one in self.sent if str(one.message.metadata.message_type) == kind)
        return [one for one in chosen if one.message.metadata.group_id == str(round_number)]

    def model(self, kind: str, round_number: int) -> State:
        """The global model that clients were sent in a round."""
        records = self.of_kind(kind, round_number)[0].message.content.array_records
        return State(unpack(records["parameters"]), unpack(records["buffers"]))

    def moved(self, kind: str) -> Floats:
        """The mean by which the server moved the model that it sends out in round 2."""
        before, after = (flat(self.model(kind, number).parameters) for number in (1, 2))
        return (before - after) / RATE


def run(experiment: Experiment, folder: Path, patch: Patch) -> Ran:
    """Carry out ``fedpriv run`` and listen to its wire."""
    sent: list[Sent] = []
    honest = fedpriv.engines.inline.answered

    def answered(app: Any, message: Message, context: Context) -> Message:
        reply = honest(app, message, context)
        sent.append(Sent(int(context.node_config["partition-id"]), message, reply))
        return reply

    with patch.context() as listening:
        listening.setattr(fedpriv.engines.inline, "answered", answered)
        start_run(experiment, folder / "run", "", Silent())
    own = RunFolder.open(folder / "run")
    assert not any(one.reply.has_error() for one in sent)
    return Ran(
        build_world(experiment, own.secret(experiment)), json.loads((own.path / "ledger.json").read_text()), sent
    )


def flat(vector: Mapping[str, torch.Tensor]) -> Floats:
    return np.concatenate([value.double().numpy().ravel() for value in vector.values()])


def gradient(world: World, client: int, before: State) -> Floats:
    """The gradient of a client's one example, by autograd."""
    before.load_into(world.model)
    images, labels = world.examples(client, np.array([0]))
    parameters = [value for value in world.model.parameters() if value.requires_grad]
    return flat(dict(enumerate(torch.autograd.grad(cross_entropy(world.model(images), labels), parameters))))  # type: ignore[arg-type]


def clipped(vector: Floats, name: str) -> Floats:
    return vector * min(1.0, CLIP / float(np.linalg.norm(vector, 1 if name == "laplace" else 2)))


def has_law(name: str, noise: float, released: Floats, exact: Floats) -> None:
    """One release of one vector, against the law of the mechanism that the ledger names.

    Args:
        name: the mechanism.
        noise: sigma, scale or kappa in the ledger.
        released: what left.
        exact: the vector before clipping.
    """
    if name == "vmf":
        doors.cosine(released / np.linalg.norm(released), exact, noise)
        return
    # Laplace noise has the scale of its multiple of the bound; hgm's shares are even.
    law = doors.laplace if name == "laplace" else doors.normal
    law(released - clipped(exact, name), noise * CLIP)


NOISE: dict[str, dict[str, Any]] = {
    "gaussian": {"sigma": 1.0, "clip_norm": CLIP},
    "laplace": {"scale": 1.0, "clip_norm": CLIP},
    "hgm": {"sigma": 1.0, "clip_norm": CLIP, "public_examples": 2},
    "vmf": {"kappa": 1800.0},
}
"""Of each mechanism whose noise clients add to their own uploads."""


def uploads(name: str, unit: str) -> Callable[[Path, Patch], None]:
    """What each client sends in the clear, and what the server makes of it."""

    def play(folder: Path, patch: Patch) -> None:
        ran = run(settings({"name": name, "unit": unit, **NOISE[name]}), folder, patch)
        (line,) = ran.ledger["clients"]
        assert ran.ledger["mechanism"] == name and line["epsilon"] is not None
        before, replies = ran.model("train", 1), ran.of_kind("train", 1)
        left = [flat(unpack(one.reply.content.array_records["upload"])) for one in replies]
        assert len(left) == CLIENTS
        for one, released in zip(replies, left, strict=True):
            assert sorted(one.reply.content) == ["buffers", "client", "upload"]
            has_law(name, line["noise"], released, gradient(ran.world, one.client, before))
        # What the server sends on is computed from the uploads alone.
        np.testing.assert_allclose(ran.moved("train"), np.mean(left, axis=0), atol=1e-5)

    return play


def without_release_noise(patch: Patch) -> None:
    """Every plan releases with next to no noise, whatever its mechanism is."""

    def released(plan: Plan, gradients: Any, divisor: int, noise: Any) -> Any:
        config = plan.config.with_noise(1e7 if plan.config.parameter == "kappa" else 1e-9)
        return config.mechanism(plan.redistribution).release(gradients, divisor, noise)

    patch.setattr(Plan, "_release", released)


def unprotected(folder: Path, patch: Patch) -> None:
    """Without a mechanism the gradients leave, and no ledger says otherwise."""
    ran = run(settings({"name": "none"}), folder, patch)
    (line,) = ran.ledger["clients"]
    assert (ran.ledger["mechanism"], line["epsilon"], line["pure_epsilon"], line["noise"]) == ("none", None, None, None)
    for one in ran.of_kind("train", 1):
        released = flat(unpack(one.reply.content.array_records["upload"]))
        np.testing.assert_allclose(released, gradient(ran.world, one.client, ran.model("train", 1)), atol=1e-5)


def filtered(name: str) -> Callable[[Path, Patch], None]:
    """What a filter leaves of the update leaves, the same again, and the ledger claims nothing about it."""

    def play(folder: Path, patch: Patch) -> None:
        ran = run(settings({"name": name}), folder, patch)
        (line,) = ran.ledger["clients"]
        assert (ran.ledger["mechanism"], line["epsilon"], line["pure_epsilon"]) == (name, None, None)
        assert line["ceilings"]["told"]["gamma"] is None
        mechanism = ran.world.plans[0].config.mechanism()
        for one in ran.of_kind("train", 1):
            released = flat(unpack(one.reply.content.array_records["upload"]))
            whole = torch.from_numpy(gradient(ran.world, one.client, ran.model("train", 1)))
            expected = mechanism.expected({"whole": whole})["whole"].numpy()
            assert np.mean(np.isclose(released, expected, atol=1e-5)) > 0.99  # rounding moves a number to a level

    return play


def masked(name: str) -> Callable[[Path, Patch], None]:
    """Under masks no upload can be read, and the sum has the noise of the ledger."""

    def play(folder: Path, patch: Patch) -> None:
        config = {"name": name, "sigma": 1.0, "clip_norm": CLIP, "unit": "update"}
        federation = {"secure_aggregation": True, "weighting": "uniform"}
        ran = run(settings(config, federation=federation), folder, patch)
        (line,) = ran.ledger["clients"]
        assert ran.ledger["mechanism"] == name and line["epsilon"] is not None
        before, replies = ran.model("train.masked", 1), ran.of_kind("train.masked", 1)
        for one in replies:
            words = unpack(one.reply.content.array_records["upload"])["masked"].numpy().view(np.uint32)
            bits = np.unpackbits(words.view(np.uint8))
            doors.hits(int(bits.sum()), np.full(len(bits), 0.5))
        exact = [clipped(gradient(ran.world, one.client, before), name) for one in replies]
        # Shares that are whole with ``survivors`` clients; of uploads with whole noise each adds its own.
        whole = ran.world.plans[0].config.least_in_sum or 1
        deviation = line["noise"] * CLIP * np.sqrt(CLIENTS / whole) / CLIENTS
        doors.normal(ran.moved("train.masked") - np.mean(exact, axis=0), deviation)

    return play


def without_shares(patch: Patch) -> None:
    honest = fedpriv.algorithms.secure_aggregation.client.encoded
    patch.setattr(
        fedpriv.algorithms.secure_aggregation.client,
        "encoded",
        lambda update, _, *streams: honest(update, 0.0, *streams),
    )


def central(name: str, folder: Path, patch: Patch) -> None:
    """Updates reach the trusted server clipped and in the clear; what it sends on has the noise."""
    ran = run(settings({"name": name, "sigma": 1.0, "clip_norm": CLIP}), folder, patch)
    (line,) = ran.ledger["clients"]
    assert ran.ledger["mechanism"] == name and line["epsilon"] is not None
    assert all("server" in view["not_against"] for view in ran.ledger["views"][:1])
    replies, before = ran.of_kind("train", 1), ran.model("train", 1)
    exact = np.mean([clipped(gradient(ran.world, one.client, before), name) for one in replies], axis=0)
    doors.normal(ran.moved("train") - exact, line["noise"] * CLIP / CLIENTS)


def without_central_noise(patch: Patch) -> None:
    patch.setattr(CentralFamily, "noise_on_mean", lambda config, clients, divisor: 1e-12)


def deployed(folder: Path, patch: Patch) -> None:
    """The app that a deployment runs, with a secret of the client's own, which no message holds."""
    from fedpriv.deploy.run import _project

    components = _project()["tool"]["flwr"]["app"]["components"]  # type: ignore[index]
    assert components["clientapp"] == "fedpriv.clients.app:app"
    memory = folder / "memory"
    memory.mkdir()
    patch.setenv(MEMORY, str(memory))
    experiment = settings({"name": "gaussian", **NOISE["gaussian"]})
    world, grid = build_world(experiment), simulated(deployed_app, CLIENTS)
    task = question(world.initial, experiment.to_json(), 1)
    (reply,) = grid.send_and_receive([Message(task, 1, "train", group_id="1")])
    released = flat(unpack(reply.content.array_records["upload"]))
    has_law("gaussian", world.plans[0].accounted([1]).noise or 0.0, released, gradient(world, 0, world.initial))
    assert any(path.name.endswith("-secret") for path in memory.iterdir())


# ---- a convex model a client ----------------------------------------------------------------------------------------


def convex(mechanism: Mapping[str, Any]) -> Callable[[Path, Patch], None]:
    """The one model that each client releases, against the minimum that it releases at an epsilon of a billion."""

    def play(folder: Path, patch: Patch) -> None:
        ran = _convex_run({**mechanism, "target_epsilon": 2.0}, folder / "ran", patch)
        exact = _convex_run({**mechanism, "target_epsilon": 1e9}, folder / "exact", patch)
        config: Any = ran.world.plans[0].config
        assert (ran.ledger["mechanism"], config.target_epsilon) == (mechanism["name"], 2.0)
        (noise,) = {line["noise"] for line in ran.ledger["clients"]}
        for client in range(CLIENTS):
            problem = client_problem(ran.world, client)
            if mechanism["name"] == "output":
                law = doors.normal if config.distribution == "gaussian" else doors.ball
                law(_weights(ran, client) - _weights(exact, client), noise)
            else:
                # At the minimum the gradient of the objective without its random term is minus that term.
                terms = objective_terms(problem, config.target_epsilon)
                slope = _slope(ran.world, client, _weights(ran, client), terms.regularisation)
                doors.ball(problem.examples * slope, noise)

    return play


def _convex_run(mechanism: Mapping[str, Any], folder: Path, patch: Patch) -> Ran:
    data = {"name": "npz", "path": examples(12, 10 * CLIENTS).path}
    own = {
        "federation": {"algorithm": "erm", "rounds": 1},
        "model": {"name": "mlp", "hidden": [], "activation": "relu"},
    }
    return run(settings(mechanism, data=data, erm={"regularisation": 0.05}, **own), folder, patch)


def _weights(ran: Ran, client: int) -> Floats:
    """The vector w that a client has released, of features whose last one is constant."""
    (one,) = [each for each in ran.of_kind("train", 1) if each.client == client]
    before = ran.model("train", 1).parameters
    change = unpack(one.reply.content.array_records["upload"])
    weight, bias = ((before[name] + value).double().numpy() for name, value in change.items())
    rows = np.concatenate([weight, bias[:, None]], axis=1) * feature_length(ran.world)
    return rows[1] - rows[0]


def _slope(world: World, client: int, weights: Floats, regularisation: float) -> Floats:
    """The gradient of the regularised logistic loss, by autograd."""
    inputs, labels = world.examples(client, np.arange(int(world.sizes[client])))
    features = torch.from_numpy(bounded_features(inputs, feature_length(world)))
    w = torch.from_numpy(weights).requires_grad_()
    signs = 2.0 * labels.double() - 1
    loss = torch.nn.functional.softplus(-signs * (features @ w)).mean() + regularisation / 2 * w.square().sum()
    return torch.autograd.grad(loss, w)[0].numpy()


def without_model_noise(patch: Patch) -> None:
    def silent(*given: Any) -> Floats:
        return 1e-9 * spread_noise(*given)

    patch.setattr("fedpriv.mechanisms.model_noise.spread_noise", silent)


# ---- somebody else's Flower app -------------------------------------------------------------------------------------

BEFORE = {"weight": np.full((30, 60), 3.0, np.float32), "bn.running_var": np.ones(5, np.float32)}
STEP = np.random.default_rng(2).normal(size=(30, 60)).astype(np.float32)


def own_app(name: str) -> Callable[[Path, Patch], None]:
    """What leaves an app under the mod: one release a message, with the noise that its own ledger names."""

    def play(folder: Path, patch: Patch) -> None:
        noise = {key: value for key, value in NOISE[name].items() if key != "public_examples"}
        keys = "\n".join(f"{key} = {value}" for key, value in noise.items())
        text = f'[mechanism]\nname = "{name}"\n{keys}\n[privatise]\nfolder = "{folder / "privacy"}"\n'
        mod = privatise(apps.settings(folder, text))
        reply = apps.client([mod], lambda given: {**given, "weight": given["weight"] + STEP})(
            apps.question(BEFORE), apps.context()
        )
        line = json.loads((folder / "privacy" / "client-3.json").read_text())
        assert line["epsilon"] is not None and line["participations"] == 1
        left = apps.arrays(reply)
        has_law(name, line["noise"], (left["weight"].astype(float) - 3.0).ravel(), STEP.astype(float).ravel())
        assert (left["bn.running_var"] == 1).all()
        assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 1}

    return play


def own_sum(folder: Path, patch: Patch) -> None:
    """The sum of an app's shares under Flower's secure aggregation has the noise that each ledger names."""
    noise = f'name = "distributed"\nsigma = 1.0\nclip_norm = {CLIP}\nsurvivors = {CLIENTS}'
    text = f'[mechanism]\n{noise}\n[privatise]\nfolder = "{folder / "privacy"}"\n'
    mod, step = privatise(apps.settings(folder, text)), STEP / np.linalg.norm(STEP) * CLIP
    ended, _ = summed([mod], [np.zeros_like(STEP)], lambda _: [step], CLIENTS, reconstruction_threshold=1.0)
    line = json.loads((folder / "privacy" / "client-0.json").read_text())
    assert line["epsilon"] is not None and line["participations"] == 1
    doors.normal((ended[0] - step).ravel() * CLIENTS, line["noise"] * CLIP)


def without_own_shares(patch: Patch) -> None:
    honest = fedpriv.flower.secure_sum.noisy_levels
    patch.setattr(fedpriv.flower.secure_sum, "noisy_levels", lambda values, _, noise: honest(values, 0.0, noise))


def refused_by_mod(folder: Path, patch: Patch) -> None:
    """A mechanism of which this client does not add the noise is not let out as if it did."""
    for name, kind in MECHANISMS.items():
        if kind.noise_at == "clients" and kind.protects:
            continue
        noise = f"{kind.parameter} = 1.0\n" if kind.parameter else ""
        text = f'[mechanism]\nname = "{name}"\n{noise}[privatise]\nfolder = "{folder / "privacy"}"\n'
        with pytest.raises(InputError):
            privatise(apps.settings(folder, text))


# ---- votes ----------------------------------------------------------------------------------------------------------

TEACHERS, QUESTIONS = 20, 400
COUNTS = np.array([11.0, 9.0])


def votes(aggregator: str) -> Callable[[Path, Patch], None]:
    """Answers to votes that the server sees: how often the smaller count wins."""

    def play(folder: Path, patch: Patch) -> None:
        pate = {"aggregator": aggregator, "target_epsilon": None, "threshold": 0.55, "queries": QUESTIONS}
        pate |= {"sigma1": 0.1, "sigma2": 0.1, "scale": 0.1}
        federation = {"algorithm": "pate", "clients": TEACHERS, "rounds": 1}
        data = {"name": "npz", "path": examples(2, 2 * TEACHERS).path}
        config = settings({"name": "none"}, federation=federation, pate=pate, data=data)
        own = PateConfig.required(config)
        world: Any = SimpleNamespace(
            experiment=config, dataset=SimpleNamespace(x_test=range(QUESTIONS)), secret=Secret.drawn()
        )
        poll = Poll(np.zeros((0, QUESTIONS), np.int16), np.zeros(0, np.int64), np.tile(COUNTS, (QUESTIONS, 1)), (), 0)
        answers = fedpriv.algorithms.pate.server.answers_of(world, poll)
        assert len(answers) == QUESTIONS
        given = [answer.label for answer in answers if answer.answered]
        gap = COUNTS[0] - COUNTS[1]
        if aggregator == "confident":
            chance = stats.norm.sf((own.threshold * TEACHERS - COUNTS[0]) / (own.sigma1 * TEACHERS))
            doors.hits(len(given), np.full(QUESTIONS, chance))
        if aggregator == "lnmax":
            ratio = gap / (own.scale * TEACHERS)  # of two Laplace numbers the difference is beyond it this often
            wrong = np.exp(-ratio) * (2 + ratio) / 4
        else:
            wrong = stats.norm.sf(gap / (np.sqrt(2) * own.sigma2 * TEACHERS))
        doors.hits(given.count(1), np.full(len(given), wrong))

    return play


def masked_votes(folder: Path, patch: Patch) -> None:
    """Noisy counts under masks, of which the sum alone can be read."""
    clients, asked = 4, 150
    pate = {"aggregator": "gnmax", "noise_at": "clients", "target_epsilon": None, "queries": asked, "sigma2": 0.5}
    federation = {"algorithm": "pate", "clients": clients, "rounds": 1, "secure_aggregation": True}
    sections: dict[str, dict[str, Any]] = {
        "data": {"name": "digits", "train_examples": 40},
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"batch_size": 2, "learning_rate": 0.1},
        "pate": {**pate, "local_epochs": 1, "student_epochs": 1},
    }
    config = settings({"name": "none"}, federation=federation, **sections)
    kept: list[Poll] = []
    with patch.context() as listening:
        server = fedpriv.algorithms.pate.server
        honest = server.keep_poll
        listening.setattr(server, "keep_poll", lambda own, poll: (kept.append(poll), honest(own, poll)))
        ran = run(config, folder, patch)
    voted = [
        fedpriv.algorithms.pate.client.teachers_votes(ran.world, client, questions(ran.world))
        for client in range(clients)
    ]
    true = np.stack([np.bincount(column, minlength=10) for column in torch.cat(voted).long().numpy().T])
    (poll,) = kept
    sigma, shares = PateConfig.required(config).sigma2 * clients, clients / 3  # whole with three of four
    doors.normal(poll.counts - true, sigma * np.sqrt(shares))


def without_shares_on_votes(patch: Patch) -> None:
    numbers = fedpriv.mechanisms.machinery.whole_numbers
    honest = numbers.noisy_counts
    patch.setattr(numbers, "noisy_counts", lambda v, k, sigma, *more: honest(v, k, 1e-9, *more))


def labels(folder: Path, patch: Patch) -> None:
    """Counts of labels that clients changed: of one label, how many were kept."""
    data = {"name": "npz", "path": examples(2, 300 * CLIENTS, labels=1).path, "label_epsilon": 1.0}
    ran = run(settings({"name": "none"}, data=data), folder, patch)
    line = ran.ledger["labels"]
    assert line["pure_epsilon"] == 1.0
    counts = np.sum([one.reply.content.metric_records["client"]["labels"] for one in ran.of_kind("train", 1)], axis=0)
    keep = 1 / (1 + np.exp(-line["pure_epsilon"]))
    doors.hits(int(counts[0]), np.full(int(counts.sum()), keep))
    assert counts.sum() == 300 * CLIENTS


def without_changed_labels(patch: Patch) -> None:
    patch.setattr(fedpriv.algorithms.labels.preparation, "changed_labels", lambda labels, *_: labels)


# ---- prompts --------------------------------------------------------------------------------------------------------


def prompts(folder: Path, model: Mapping[str, Any] | None = None, **icl: Any) -> tuple[Mapping[str, Any], Path]:
    """Carry out a file of ``fedpriv icl``; returns its ledger and its folder."""
    from fedpriv.core.config import validated
    from fedpriv.prompts.settings import Prompting

    rows = ["text,label", *(f"word{number % 7} n{number},{('no', 'yes')[number % 2]}" for number in range(1000))]
    (folder / "own.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    common = {"shots": 1, "calibrated": False, "compare": (), "target_epsilon": 0.5}
    tree = {"data": {"name": "csv", "path": str(folder / "own.csv")}, "icl": {**common, **icl}, "model": model or {}}
    config = validated(Prompting, {**tree, "leaks": {"pairs": 0, "repeats": 0}}, "")
    start_icl(config, folder / "icl", Silent())
    return json.loads((folder / "icl" / "ledger.json").read_text()), folder / "icl"


def answered_prompts(folder: Path, patch: Patch) -> None:
    """Answers by votes that the server sees: how often the smaller count wins."""
    voters, asked = 10, 150
    fixed = np.array([0] * 6 + [1] * 4)
    patch.setattr(fedpriv.prompts.classify.Classifier, "votes", lambda *_: fixed)
    ledger, left = prompts(folder, prompts=voters, queries=asked)
    said = [json.loads(line)["answer"] for line in (left / "answers.jsonl").read_text().splitlines()]
    wrong = stats.norm.sf(2 / (np.sqrt(2) * ledger["parameters"]["sigma"]))
    assert ledger["worst"]["epsilon"] <= 0.5
    doors.hits(sum(answer == said_second(left) for answer in said), np.full(asked, wrong))


def said_second(left: Path) -> str:
    return str(json.loads((left / "icl.json").read_text())["labels"][1])


def masked_prompts(folder: Path, patch: Patch) -> None:
    """Noisy counts of prompts' votes, of which the server gets the sum alone."""
    clients, asked = 4, 150
    patch.setattr(fedpriv.prompts.classify.Classifier, "votes", lambda *_: np.zeros(2, dtype=np.int64))
    icl = {"unit": "client", "clients": clients, "noise_at": "clients", "prompts": 2, "queries": asked}
    ledger, left = prompts(folder, **icl)
    counts = np.array(json.loads((left / "private" / "counts.json").read_text())["counts"])
    doors.normal(counts - [2 * clients, 0], ledger["parameters"]["sigma"] * np.sqrt(clients / 3))


def without_shares_on_prompts(patch: Patch) -> None:
    honest = fedpriv.algorithms.secure_aggregation.client.masked_counts
    limited = fedpriv.mechanisms.machinery.whole_numbers.votes_limit

    def silent(votes: Any, labels: int, sigma: float, clients: int, noise: Any) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(
                fedpriv.mechanisms.machinery.whole_numbers,
                "votes_limit",
                lambda *_: limited(len(votes), sigma, clients),
            )
            return honest(votes, labels, 1e-9, clients, noise)

    patch.setattr(fedpriv.algorithms.secure_aggregation.client, "masked_counts", silent)


class Even(Counting):
    """A language model to which two tokens are likeliest, one of them a little."""

    def likeliest(self, prompt: str, count: int) -> tuple[str, ...]:
        return (" more", " less")

    def after(self, prefixes: Any, endings: Any, candidates: Any) -> Any:
        row = np.log([0.6, 0.4] if len(candidates) == 2 else np.full(len(candidates), 1 / len(candidates)))
        return np.broadcast_to(row, (len(prefixes), len(endings), len(candidates)))


def written_prompts(folder: Path, patch: Patch) -> None:
    """Synthetic examples, token by token: how often the less likely one is written."""
    voters, tokens = 10, 100
    patch.setattr("fedpriv.prompts.run.open_language", lambda *_: Even())
    own = {"name": "folder", "path": str(folder)}
    ledger, left = prompts(
        folder, own, mode="generate", prompts=voters, tokens=tokens, synthetic=2, queries=2, likeliest=2
    )
    texts = [json.loads(line)["text"].split() for line in (left / "synthetic.jsonl").read_text().splitlines()]
    words = [word for text in texts for word in text]
    assert len(words) == 4 * tokens
    wrong = stats.norm.sf(0.2 * voters / (np.sqrt(2) * ledger["parameters"]["sigma"]))
    doors.hits(words.count("less"), np.full(len(words), wrong))


def without_noise_on_prompts(patch: Patch) -> None:
    without_noise_on_counts(patch)
    honest = fedpriv.prompts.generate._decided
    patch.setattr(fedpriv.prompts.generate, "_decided", lambda scores, _, generator: honest(scores, 0.0, generator))


# ---- the endpoint ---------------------------------------------------------------------------------------------------

HEAD = {"features": "pooled:4", "regularisation": 0.01, "tolerance": 1e-6}
POLICY: dict[str, dict[str, Any]] = {
    "model": {"noise": 0.05, **HEAD},
    "logits": {"noise": 1.0, **HEAD},
    "label": {"noise": 0.5, **HEAD},
    "label-confidence": {"noise": 0.5, **HEAD},
    "votes": {"noise": 3.0, "shards": 20, "features": "pooled:4", "regularisation": 0.01, "tolerance": 1e-6},
    "post-processing": {},
}
PRIVATE: dict[str, Any] = {"name": "gaussian", "sigma": 1.0}
"""The mechanism of a run whose ledger is its endpoint's, too."""

ASKED = 300


def endpoint(folder: Path, method: str, keys: Mapping[str, Any], name: str = "run") -> tuple[Any, Any, list[Any]]:
    """Make an endpoint of a run of ``fedpriv run`` and ask it over HTTP; returns it, its facts and the answers."""
    own = RunFolder.open(folder / name)
    served = open_service(own, ServiceConfig.model_validate({"method": method, "answers": ASKED, **keys}), Silent())
    world = build_world(own.experiment(), own.secret(own.experiment()))
    images = world.dataset.x_test[:ASKED].double() / 255
    with TestClient(build_app(served, (), {})) as client:
        response = client.post("/answers", json={"images": images.tolist()})
    assert response.status_code == 200
    given = response.json()["answers"]
    # ``fedpriv query`` asks without a server: the same questions are free, and have the same answers.
    assert served.ask(images).labels.tolist() == [answer["label"] for answer in given]
    assert served.ledger.used == ASKED
    return served, own.read(Service), given


def finished_run(folder: Path, name: str = "run", mechanism: Mapping[str, Any] | None = None) -> None:
    config = settings(
        mechanism or {"name": "none"},
        data={"name": "digits"},
        federation={"rounds": 1},
        model={"name": "mlp", "hidden": [8]},
        training={"batch_size": 16},
    )
    start_run(config, folder / name, "", Silent())


def answers(method: str) -> Callable[[Path, Patch], None]:
    """What an endpoint answers over HTTP, by its policy, against its own exact scores."""

    def play(folder: Path, patch: Patch) -> None:
        finished_run(folder, mechanism=PRIVATE if method == "post-processing" else None)
        served, facts, given = endpoint(folder, method, POLICY[method])
        assert facts.guarantee.epsilon is not None
        questions = RunFolder.open(folder / "run").experiment()
        images = build_world(questions, RunFolder.open(folder / "run").secret(questions)).dataset.x_test[:ASKED]
        scores = served.oracle.scores(images)
        labels = np.array([answer["label"] for answer in given])
        shown = np.array([answer["probabilities"] or [np.nan] for answer in given], dtype=float)
        _compared(method, folder, facts, scores, labels, shown)

    return play


def _compared(method: str, folder: Path, facts: Any, scores: Floats, labels: NDArray[np.int64], shown: Floats) -> None:
    rows = np.arange(len(labels))
    softmax = np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))
    match method:
        case "post-processing":
            np.testing.assert_allclose(shown, softmax, atol=1e-9)
            worst = RunFolder.open(folder / "run").final_ledger().worst
            assert facts.guarantee.epsilon == worst.epsilon
        case "model":
            np.testing.assert_allclose(shown, softmax, atol=1e-9)
            doors.normal(_released_weights(folder) - _exact_weights(folder), facts.scale)
        case "logits":
            # Of the logits with noise their differences are shown: nine of ten numbers an answer.
            apart = np.log(shown) - np.log(softmax)
            apart -= apart.mean(axis=1, keepdims=True)
            _, _, turn = np.linalg.svd(np.full((1, 10), 1.0))
            doors.normal(apart @ turn[1:].T, facts.scale)
        case "label" | "label-confidence":
            drawn = np.exp(scores / facts.scale - np.logaddexp.reduce(scores / facts.scale, axis=1, keepdims=True))
            doors.hits(int((labels == drawn.argmax(axis=1)).sum()), drawn.max(axis=1))
            if method == "label-confidence":
                assert (np.isfinite(shown).sum(axis=1) == 1).all()
                odds = np.log(softmax[rows, labels]) - np.log1p(-softmax[rows, labels])
                told = shown[rows, labels]
                doors.laplace(np.log(told) - np.log1p(-told) - odds, facts.scale)
        case "votes":
            grid = np.linspace(-8, 8, 801)[:, None, None]
            density = stats.norm.pdf(grid[:, :, 0])
            best = scores.argmax(axis=1)
            behind = (scores[rows, best][:, None] - scores) / facts.scale
            below = stats.norm.cdf(grid + behind)
            below[:, rows, best] = 1.0
            doors.hits(int((labels == best).sum()), np.trapezoid(density * below.prod(axis=2), dx=0.02, axis=0))


def _released_weights(folder: Path) -> Floats:
    from safetensors.numpy import load_file

    return np.asarray(load_file(folder / "run" / "service" / "model.safetensors")["weights"])


def _exact_weights(folder: Path) -> Floats:
    """The minimum that the convex head has, from the referee's side."""
    own = RunFolder.open(folder / "run")
    world = build_world(own.experiment(), own.secret(own.experiment()))
    config = ServiceConfig.model_validate({"method": "model", "answers": ASKED, **POLICY["model"]})
    head = made_source(folder / "elsewhere", world, config.policy, None).head
    assert head is not None
    return head.minimum.weights


def unproven(folder: Path, patch: Patch) -> None:
    """A policy that adds no noise, or noise that proves nothing, has no figure."""
    finished_run(folder)
    short = {"rounded": "rounded:2", "top": "top:2"}
    plain = [name for name in POLICIES if name not in POLICY]
    for number, name in enumerate(plain):
        (folder / str(number)).mkdir()
        finished_run(folder, f"{number}/run")
        _, facts, _ = endpoint(folder, short.get(name, name), {}, f"{number}/run")
        assert (facts.guarantee.epsilon, facts.guarantee.pure_epsilon) == (None, None)


def without_noise_of_answers(patch: Patch) -> None:
    honest = Draws

    def silent(scale: float, generators: Any = (), facts: Any = None) -> Draws:
        return honest(1e-9 * scale, generators, facts)

    patch.setattr("fedpriv.service.policies.Draws", silent)


def without_noise_of_the_run(patch: Patch) -> None:
    """A run without noise under the policy that rests on the run's."""
    patch.setattr("fedpriv.service.policies.network.PostProcessing.check", lambda *_: None)
    patch.setitem(PRIVATE, "name", "none")
    patch.delitem(PRIVATE, "sigma")


# ---- a table's bounds -----------------------------------------------------------------------------------------------


def bounds(folder: Path, patch: Patch) -> None:
    """Bounds of a table's numbers: how often a count just above the threshold is missed."""
    epsilon, tries = 1.0, 200
    counted = fedpriv.data.bounds.SHARES[0] * epsilon
    scale, threshold = fedpriv.data.bounds._SENSITIVITY / counted, fedpriv.data.bounds.threshold(counted)
    rows = int(threshold) + 1
    numbers = {"height": np.concatenate([np.full(10 * rows, 1.5), np.full(rows, 100.0)])}
    high = [fedpriv.data.bounds.estimated_bounds(numbers, epsilon, Secret.drawn())["height"][1] for _ in range(tries)]
    # Two-sided geometric noise: P(noise < 1 - fraction), that is P(noise <= 0) or less.
    ratio = np.exp(-1 / scale)
    least = np.floor(threshold) + 1 - rows
    missed = 1 - ratio ** max(least, 0) / (1 + ratio)
    doors.hits(sum(each < 100 for each in high), np.full(tries, missed))


def without_noise_of_bounds(patch: Patch) -> None:
    patch.setattr(fedpriv.data.bounds, "_geometric", lambda count, *_: np.zeros(count, dtype=np.int64))


# ---- all of them ----------------------------------------------------------------------------------------------------

CHECKS: dict[str, Check] = {
    **{
        f"upload, {name}, {unit}": Check(uploads(name, unit), without_release_noise)
        for name in NOISE
        for unit in ("example", "update")
    },
    "upload, none": Check(unprotected, None),
    **{f"upload, {name}": Check(filtered(name), None) for name in ("percentile", "top-k", "sign", "quantise")},
    "masked upload, gaussian": Check(masked("gaussian"), without_release_noise),
    "masked upload, distributed": Check(masked("distributed"), without_shares),
    "noise on the sum, central": Check(partial(central, "central"), without_central_noise),
    "noise on the sum, correlated": Check(partial(central, "correlated"), without_central_noise),
    "upload of a deployed client": Check(deployed, without_release_noise),
    "model of a client, output": Check(convex({"name": "output"}), without_model_noise),
    "model of a client, output, laplace": Check(
        convex({"name": "output", "distribution": "laplace"}), without_model_noise
    ),
    "model of a client, objective": Check(convex({"name": "objective"}), without_model_noise),
    **{
        f"somebody's app, {name}": Check(own_app(name), without_release_noise)
        for name in ("gaussian", "laplace", "vmf")
    },
    "somebody's app, distributed": Check(own_sum, without_own_shares),
    "somebody's app, noise elsewhere": Check(refused_by_mod, None),
    **{f"votes, {name}": Check(votes(name), without_noise_on_counts) for name in ("confident", "gnmax", "lnmax")},
    "masked votes": Check(masked_votes, without_shares_on_votes),
    "label survey": Check(labels, without_changed_labels),
    "answers of prompts": Check(answered_prompts, without_noise_on_prompts),
    "masked votes of prompts": Check(masked_prompts, without_shares_on_prompts),
    "synthetic examples": Check(written_prompts, without_noise_on_prompts),
    **{
        f"answers, {name}": Check(answers(name), without_noise_of_answers)
        for name in POLICY
        if name != "post-processing"
    },
    "answers, post-processing": Check(answers("post-processing"), without_noise_of_the_run),
    "answers, unproven": Check(unproven, None),
    "bounds of a table": Check(bounds, without_noise_of_bounds),
}
