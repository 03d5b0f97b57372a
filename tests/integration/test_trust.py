"""Where the noise is: whole runs with central and distributed noise, what is seen of them, and what is refused."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from flwr.app import Message

from fedpriv.accounting import running_epsilon
from fedpriv.accounting.correlated import noise_factors
from fedpriv.algorithms.rounds.ledger import LISTS_PARTICIPANTS, run_ledger, views
from fedpriv.attacks.membership.audit import audit_run
from fedpriv.attacks.references import Pool, Reference, train_references
from fedpriv.clients.app import client_app
from fedpriv.clients.training import local_upload
from fedpriv.core.asked_log import released_rounds, replay
from fedpriv.core.budget import Budget
from fedpriv.core.config import Experiment
from fedpriv.core.config.rules import check_trust
from fedpriv.core.errors import InputError, RunInterruptedError
from fedpriv.core.lab import resume_run, start_run
from fedpriv.core.plan import Plan, participants
from fedpriv.core.progress import Silent
from fedpriv.core.randomness import Secret
from fedpriv.core.records import Asked, LedgerLine
from fedpriv.core.registry import check_complete
from fedpriv.core.report import reported
from fedpriv.core.runs import RunFolder
from fedpriv.core.world import State, World, build_world
from fedpriv.data.sampling import Sampling
from fedpriv.engines.inline import simulated
from fedpriv.mechanisms import MechanismSettings, mechanism_settings
from fedpriv.mechanisms.central import CentralSettings
from fedpriv.mechanisms.gaussian import GaussianSettings
from fedpriv.mechanisms.machinery.base import NoiseAt
from fedpriv.server.aggregation import CentralNoise
from fedpriv.server.exchange import question
from fedpriv.server.tap import observe
from fedpriv.server.uploads import Upload, norm
from fedpriv.sweep.settings import load_sweep
from tests.cases import in_one_test
from tests.integration.small import experiment, left_behind

CENTRAL = {"name": "central", "sigma": 0.5, "clip_norm": 0.4}


def settings(mechanism: dict[str, object], **federation: object) -> Experiment:
    secure = mechanism["name"] == "distributed"
    return experiment(
        mechanism=mechanism,
        federation={"weighting": "uniform", "secure_aggregation": secure, **federation},
        data={"train_examples": 80},
    )


def test_central_noise_is_on_the_sum_and_its_own_for_every_sum() -> None:
    world = build_world(settings(CENTRAL, clients_per_round=2))
    zero = State({name: torch.zeros_like(value) for name, value in world.initial.parameters.items()}, {})
    long = State({name: value + 7 for name, value in zero.parameters.items()}, {})
    alone = CentralNoise(world).mean(1, ())
    noise = torch.cat([value.flatten() for value in alone.parameters.values()]).double()
    # Deviation sigma C / m; that of so many numbers is off by more than 5 / sqrt(2 K) of it once in 10^6 times.
    assert float(noise.std()) == pytest.approx(0.5 * 0.4 / 2, rel=5 / math.sqrt(2 * len(noise)))
    assert all(torch.equal(a, b) for a, b in zip(
        alone.parameters.values(), CentralNoise(world).mean(1, (Upload(0, 20, zero),)).parameters.values(), strict=True
    ))  # fmt: skip
    other = CentralNoise(world).mean(1, (Upload(0, 20, long),))
    moved = torch.cat([value.flatten() for value in other.parameters.values()]).double()
    assert not torch.allclose(moved - moved.mean(), noise - noise.mean())
    # The long update is clipped to 0.4, and divided by the two clients of a round though one has failed.
    assert float(moved.mean()) == pytest.approx(0.4 / math.sqrt(len(noise)) / 2, abs=5 * 0.1 / math.sqrt(len(noise)))


@pytest.mark.essential
def test_a_run_with_central_noise_and_sampled_clients(tmp_path: Path) -> None:
    """Rounds that ask nobody are noise, too; both lines count all rounds; a resumed run has the same bytes."""
    run = settings(CENTRAL, clients_per_round=1, client_sampling="poisson", rounds=6)
    start_run(run, tmp_path / "run", "", Silent())
    folder = RunFolder.open(tmp_path / "run")
    known, amplified = folder.ledger().views
    asked = folder.asked()
    assert {line.round for line in asked} == set(range(1, 7))
    assert [] in [list(line.clients) for line in asked]
    assert max(sum(client in line.clients for line in asked) for client in range(4)) < 6
    assert (known.guarantee.participations, amplified.guarantee.participations) == (6, 6)
    assert folder.rounds()[-1].epsilon >= known.guarantee.epsilon > amplified.guarantee.epsilon
    assert (known.guarantee.sampling, amplified.guarantee.sampling) == ("full", "poisson, rate 0.25")
    assert "asked" in amplified.not_against
    assert "server" in known.not_against
    before = left_behind(tmp_path / "run")
    resume_run(tmp_path / "run", Silent())
    assert left_behind(tmp_path / "run") == before
    audited = audit_run(folder, 6, 2, Silent())
    assert audited.proven_epsilon == known.guarantee.epsilon
    assert audited.epsilon_bound.epsilon <= known.guarantee.epsilon


@pytest.mark.slow
def test_what_tells_of_the_draw_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that differ in the clients drawn, and in no update: steps are too short to move a parameter.

    So models and noise are the same, and whatever else differs tells who was asked. A new file that does has to be
    named in ``LISTS_PARTICIPANTS``.
    """
    run = settings(
        {"name": "central", "target_epsilon": 8.0, "clip_norm": 0.4},
        clients=8,
        clients_per_round=2,
        client_sampling="poisson",
        algorithm="fedavg",
    ).model_dump(mode="json", exclude_unset=True)
    run["training"] |= {"learning_rate": 1e-40, "batch_size": 5}
    run["adversary"] |= {"attacks": ["iga"], "iga": {"iterations": 1}, "victims": 1, "rounds": [1]}
    left, models, epsilons, shown = [], [], [], []
    for number in (1, 2):
        path, draw = tmp_path / str(number) / "run", Secret.of_seed(number)
        monkeypatch.setattr(
            "fedpriv.server.rounds.participants",
            lambda given, each, among=None, secret=None, own=draw: participants(given, each, among, own),
        )
        with reported(path):
            start_run(Experiment.model_validate(run), path, "fedpriv run", Silent())
        folder = RunFolder.open(path)
        assert any(line.clients for line in folder.asked())
        left.append(left_behind(path))
        models.append((path / "checkpoint" / "server.safetensors").read_bytes())
        epsilons.append([record.epsilon for record in folder.rounds()])
        shown.append(folder.ledger().views[1].not_against)
    differ = {name.split("/")[0] for name in left[0].keys() | left[1].keys() if left[0].get(name) != left[1].get(name)}
    assert models[0] == models[1]
    assert epsilons[0] == epsilons[1]
    assert {"asked.jsonl", "metrics.jsonl"} <= differ <= set(LISTS_PARTICIPANTS)
    assert all(name in text for name in LISTS_PARTICIPANTS for text in shown)


def test_every_model_counts_once_for_every_client_whoever_was_asked() -> None:
    """Also of rounds that asked nobody; one that was asked again with another question released a second model."""
    run = settings(CENTRAL, clients_per_round=1, client_sampling="poisson", rounds=4)
    plans = build_world(run).plans
    lines = [Asked(1, (2,), "a"), Asked(2, (), "b"), Asked(2, (), "c"), Asked(3, (0, 1), "d")]
    assert released_rounds(lines) == (1, 2, 2, 3)
    found = []
    for known in (lines[:2], lines):
        budget = Budget(run, plans)
        replay(budget, known)
        budget.spend(4, [])
        found.append(budget.worst_epsilon)
    assert found == [running_epsilon(plans[0].accounted(range(count))) for count in (3, 5)]


@in_one_test(("clients", "asked"), [(4, 2), (7, 3), (5, 5), (10, 1)])
@in_one_test("rounds", [1, 9, 23])
def test_clients_take_turns(clients: int, asked: int, rounds: int) -> None:
    run = settings(CENTRAL, clients=clients, clients_per_round=asked, rounds=rounds, client_sampling="turns")
    chosen = [participants(run, number, None, Secret.of_seed(1)) for number in range(1, rounds + 1)]
    assert all(len(set(each)) == asked for each in chosen)
    for client in range(clients):
        mine = [number for number, each in enumerate(chosen) if client in each]
        assert len(mine) <= run.federation.most_rounds
        assert all(later - earlier >= run.federation.separation for earlier, later in pairwise(mine))


def correlated(**federation: object) -> Experiment:
    usual = {"clients_per_round": 2, "client_sampling": "turns", "rounds": 7, **federation}
    return settings({"name": "correlated", "sigma": 0.5, "clip_norm": 0.4, "band": 3}, **usual)


@pytest.mark.essential
def test_an_interrupted_run_with_correlated_noise_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the noise of the round that was interrupted had been drawn already."""

    def interrupted(world: World, folder: RunFolder, number: int, *arguments: object) -> None:
        if number == 5:
            raise KeyboardInterrupt

    start_run(correlated(), tmp_path / "whole", "fedpriv run x", Silent())
    with monkeypatch.context() as patched, pytest.raises(RunInterruptedError):
        patched.setattr("fedpriv.server.rounds.record_heard", interrupted)
        start_run(correlated(), tmp_path / "cut", "fedpriv run x", Silent())
    checkpoint = RunFolder.open(tmp_path / "cut").load_checkpoint()
    assert checkpoint is not None and tuple(checkpoint.tensors["noise/marks"].shape) == (2, 32)
    resume_run(tmp_path / "cut", Silent())
    assert left_behind(tmp_path / "cut") == left_behind(tmp_path / "whole")
    ledger = RunFolder.open(tmp_path / "whole").ledger()
    assert ledger is not None
    assert len(ledger.views) == 1  # no line with amplification
    assert (ledger.worst.participations, ledger.worst.sampling) == (4, "full, at most every 2 rounds")
    assert {key: ledger.parameters[key] for key in ("band", "separation", "participations", "rounds")} == {
        "band": 3, "separation": 2, "participations": 4, "rounds": 7
    }  # fmt: skip


def test_a_participation_that_breaks_the_pattern_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the server before it asks anybody, by the ledger of a folder that says otherwise, and for another question."""
    monkeypatch.setattr("fedpriv.server.rounds.participants", lambda *_: (0, 1))
    with pytest.raises(InputError, match="round 2 would take client 0 beyond the participation pattern"):
        start_run(correlated(), tmp_path / "run", "", Silent())
    folder = RunFolder.open(tmp_path / "run")
    assert {line.round for line in folder.asked()} == {1}
    folder.append_asked(replace(folder.asked()[0], round=2))
    with pytest.raises(InputError, match=r"beyond the participation pattern .* in 4 of 7 rounds at most"):
        run_ledger(build_world(correlated()), folder)
    budget = Budget(correlated(), build_world(correlated()).plans)
    with pytest.raises(InputError, match="round 1 would take client 2"):
        replay(budget, [Asked(1, (2, 3), "a"), Asked(1, (2,), "b")])


def test_a_band_of_one_is_central_noise_and_a_wider_one_takes_from_it_what_came_before() -> None:
    central = build_world(settings(CENTRAL, clients_per_round=2))
    world = build_world(correlated())
    alone = build_world(settings({**CENTRAL, "name": "correlated", "band": 1}, clients_per_round=2))
    noises = [CentralNoise(each) for each in (central, alone, world)]
    rounds = [[flat(noise.mean(number, ())) for number in range(1, 5)] for noise in noises]
    assert all(torch.equal(first, second) for first, second in zip(*rounds[:2], strict=True))
    assert noises[1].kept == 0 and noises[2].kept == 3
    own = rounds[2][0]
    for number, released in enumerate(rounds[2]):
        # By the formula, with the noise of its own that is left when that of earlier rounds is taken off.
        factors = noise_factors(3)[: number + 1]
        expected = 0.5 * 0.4 / 2 * math.hypot(*factors)
        assert float(released.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * len(own)))
    # Next to each other: -1/2 + 1/16 of a round's variance.
    product = float((rounds[2][2] * rounds[2][3]).mean()) / (0.5 * 0.4 / 2) ** 2
    assert product == pytest.approx(-0.5 + 0.5 * 0.125, abs=6 * 1.3 / math.sqrt(len(own)))


def flat(state: State) -> torch.Tensor:
    return torch.cat([value.flatten() for value in state.parameters.values()]).double()


def test_audits_and_outsiders_meet_the_correlated_noise() -> None:
    """Reference models that differ in their noise alone, after two rounds of it; and the law of one round's noise."""
    run = correlated(rounds=3, server_learning_rate=1.0)
    world = build_world(run.model_copy(update={
        "mechanism": mechanism_settings({"name": "correlated", "sigma": 30.0, "clip_norm": 0.4, "band": 2}),
        "adversary": run.adversary.model_copy(update={"threat_model": "outsider", "attacks": ("iga",), "victims": 1}),
    }))  # fmt: skip
    pool = Pool(world.network_input(world.dataset.x_train), world.dataset.y_train)
    shares = tuple(np.asarray(rows) for rows in world.partitions)
    references = [Reference(number, shares) for number in (1, 2)]
    models = train_references(world, pool, references, {1: (0, 1), 2: (2, 3)}, {2})[2]
    apart = torch.cat([(value[0] - value[1]).flatten().double() for value in models.values()])
    # z_2 + z_1 / 2 is left in the sum.
    expected = math.sqrt(2) * math.hypot(1, 0.5) * 30 * 0.4 / 2
    assert float(apart.std(correction=0)) == pytest.approx(expected, rel=6 / math.sqrt(2 * len(apart)))
    zero = State({name: torch.zeros_like(value) for name, value in world.initial.parameters.items()}, {})
    uploads = tuple(Upload(client, 20, zero) for client in range(2))
    for number, factor in ((1, 1.0), (2, math.hypot(1, 0.5))):
        (heard,) = observe(world, number, world.initial, uploads, zero)
        assert heard.settings.mechanism["sigma"] == pytest.approx(30 * factor / math.sqrt(2))


def test_correlated_noise_for_examples() -> None:
    """A round's sum has noise for a clipped gradient; an example is in one step of a pass, a client in every second."""
    tree = {"name": "correlated", "sigma": 0.5, "clip_norm": 0.4, "band": 1, "unit": "example"}
    world = build_world(settings(tree, clients_per_round=2, rounds=9, algorithm="fedsgd"))
    noise = flat(CentralNoise(world).mean(1, ()))
    batch, steps = world.plans[0].sampling.batch_size, world.plans[0].sampling.steps_per_epoch
    assert (batch, steps) == (4, 5)
    assert float(noise.std()) == pytest.approx(0.5 * 0.4 / 2 / batch, rel=5 / math.sqrt(2 * len(noise)))
    assert [world.plans[0].participations(range(1, last + 1)) for last in (0, 1, 5, 6, 9)] == [0, 1, 1, 2, 2]
    upload = local_upload(world, 0, world.initial, 1)
    assert 0 < norm(upload.parameters) <= 0.4 * (1 + 1e-6)


@in_one_test("sampling", ["poisson", "fixed"])
@in_one_test("adjacency", ["replace-one", "zero-out"])
@in_one_test(("asked", "rounds", "sigma"), [(1, 1, 0.3), (1, 40, 3.0), (9, 1, 0.3), (9, 5, 1.0), (9, 400, 60.0)])
def test_the_amplified_line_is_never_above_the_plain_one(
    asked: int, rounds: int, sigma: float, adjacency: str, sampling: str
) -> None:
    """Also where a cohort of a fixed size is accounted for under replace-one, and the plain line is about zero-out."""
    run = experiment(
        mechanism={**CENTRAL, "sigma": sigma, "adjacency": adjacency},
        federation={
            "clients": 10,
            "clients_per_round": asked,
            "client_sampling": sampling,
            "rounds": rounds,
            "weighting": "uniform",
        },
        data={"train_examples": 80},
    )
    world = build_world(run)
    plain = LedgerLine.of(0, 8, world.plans[0].guarantee(range(1, rounds + 1)))
    known, amplified = views(world, plain)
    assert known.guarantee.epsilon == plain.epsilon
    assert amplified.guarantee.epsilon <= plain.epsilon
    if amplified.guarantee.epsilon == plain.epsilon:
        assert "no amplification used" in amplified.guarantee.theorem["epsilon"]


def test_the_reference_models_of_an_audit_have_the_central_noise() -> None:
    """Two that differ in their noise alone differ by normal numbers of deviation sqrt(2) sigma C / m."""
    run = experiment(
        mechanism=CENTRAL,
        federation={"weighting": "uniform", "clients_per_round": 2, "rounds": 1, "server_learning_rate": 1.0},
        data={"train_examples": 80},
        training={"batch_size": 20},
    )
    world = build_world(run)
    pool = Pool(world.network_input(world.dataset.x_train), world.dataset.y_train)
    shares = tuple(np.asarray(rows) for rows in world.partitions)
    # One of the two clients has failed, and the divisor is public.
    models = train_references(world, pool, [Reference(1, shares), Reference(2, shares)], {1: (0,)}, {1})[1]
    apart = torch.cat([(value[0] - value[1]).flatten().double() for value in models.values()])
    # Off by more than 5 / sqrt(2 K) of it once in 10^6 times.
    expected = math.sqrt(2) * 0.5 * 0.4 / 2
    assert float(apart.std(correction=0)) == pytest.approx(expected, rel=5 / math.sqrt(2 * len(apart)))


@pytest.mark.essential
@pytest.mark.parametrize(
    ("mechanism", "listener"),
    [({"name": "distributed", "sigma": 0.5, "clip_norm": 0.4}, "secure-aggregation"), (CENTRAL, "outsider")],
    ids=["distributed", "outsider"],
)
def test_a_sum_is_attacked_and_the_run_goes_through_to_the_report(
    mechanism: dict[str, object], listener: str, tmp_path: Path
) -> None:
    adversary = {"attacks": ["iga"], "iga": {"iterations": 2}, "victims": 1, "threat_model": listener}
    run = experiment(
        mechanism=mechanism,
        federation={"weighting": "uniform", "secure_aggregation": listener != "outsider", "rounds": 1},
        data={"train_examples": 80},
        training={"batch_size": 1},
        adversary={**adversary, "best_decision": True, "counterfactual": False},
    )
    with reported(tmp_path / "run"):
        summary = start_run(run, tmp_path / "run", "", Silent())
    assert [attack.attack for attack in summary.attacks if attack.upload != "none"] == ["iga"]
    assert "iga" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_a_run_with_distributed_noise(tmp_path: Path) -> None:
    """The mean that the model moves by is the sum of clipped updates with noise of the ledger's size, or more."""
    mechanism = {"name": "distributed", "sigma": 0.5, "clip_norm": 0.4}
    run = settings(mechanism, rounds=1, server_learning_rate=1.0)
    world = build_world(run)
    start_run(run, tmp_path / "run", "", Silent())
    folder = RunFolder.open(tmp_path / "run")
    checkpoint = folder.load_checkpoint()
    assert checkpoint is not None
    moved = torch.cat([
        (checkpoint.tensors[f"parameters/{name}"] - value).flatten().double()
        for name, value in world.initial.parameters.items()
    ])  # fmt: skip
    # Clipped updates of four clients have a mean of norm 0.4 at most; the noise on it, of 4 shares where 3 are whole:
    noise = 0.5 * 0.4 * math.sqrt(4 / 3) / 4 * math.sqrt(len(moved))
    slack = 5 / math.sqrt(2 * len(moved))
    assert noise * (1 - slack) - 0.4 <= float(moved.norm()) <= noise * (1 + slack) + 0.4
    (view,) = folder.ledger().views
    assert view.sees.startswith("the sum")
    assert view.guarantee.epsilon == folder.ledger().worst.epsilon


class ElsewhereSettings(CentralSettings):
    """As a package of somebody else's may have it: no code of ours adds noise at that place."""

    noise_at: ClassVar[NoiseAt] = "proxy"  # type: ignore[assignment]


class SilentSettings(GaussianSettings):
    """Noise at the server, of which the mechanism does not say how much: an upload would leave as it is."""

    noise_at: ClassVar[NoiseAt] = "server"

    @property
    def bound(self) -> float:
        return self.clip_norm


class UnboundedSettings(GaussianSettings):
    """The same, and nothing bounds an update in the sum."""

    noise_at: ClassVar[NoiseAt] = "server"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            ElsewhereSettings(sigma=1.0),
            r"would leave without noise here, since it is added at 'proxy'; allowed: .*central",
        ),
        (SilentSettings(sigma=1.0, unit="update"), "does not say how much noise a sum gets"),
        (UnboundedSettings(sigma=1.0, unit="update"), "bounds no norm of updates in a sum"),
        (SilentSettings(sigma=1.0), "needs mechanism.unit = 'update'"),
    ],
    ids=["another place", "no amount", "no bound", "examples"],
)
def test_a_mechanism_of_a_package_that_is_noised_nowhere_is_refused(config: MechanismSettings, said: str) -> None:
    run = settings(CENTRAL).model_copy(update={"mechanism": config})
    with pytest.raises(ValueError, match=said):
        check_trust(run)


def test_a_package_cannot_enter_a_place_that_there_is_not() -> None:
    with pytest.raises(TypeError, match=r"noise_at = 'proxy' is no .*server"):
        check_complete(ElsewhereSettings, MechanismSettings)


@pytest.mark.parametrize(("name", "kind"), [("distributed", "train"), ("central", "train.masked")])
def test_a_client_is_not_asked_in_a_way_that_adds_no_noise(name: str, kind: str) -> None:
    """A server that asks for a share in the clear, or for a clipped update under a mask, gets a refusal."""
    run = settings({"name": name, "sigma": 0.5, "clip_norm": 0.4})
    world, grid = build_world(run), simulated(client_app(Secret.of_seed(0)), 4)
    message = Message(question(world.initial, run.to_json(), 1), 1, kind, group_id="1")
    (reply,) = grid.send_and_receive([message])
    assert reply.has_error() and f"mechanism.name = '{name}': would leave without noise here" in reply.error.reason


@pytest.mark.parametrize("name", ["central", "distributed"])
def test_a_plan_that_nobody_told_of_a_server_or_masks_is_refused(name: str) -> None:
    config = mechanism_settings({"name": name, "sigma": 1.0})
    with pytest.raises(InputError, match=f"'{name}': would leave without noise here"):
        Plan(0, Sampling("shuffled", 1, 1), 1, config, (3,), 0)


def test_the_sweep_compares_the_places_of_the_noise_at_one_epsilon() -> None:
    trials = [trial.experiment for trial in load_sweep(Path("configs/sweeps/trust.toml")).trials]
    assert {(trial.mechanism.noise_at, trial.adversary.threat_model) for trial in trials} == {
        ("clients", "honest-but-curious-server"),
        ("sum", "secure-aggregation"),
        ("server", "honest-but-curious-server"),
        ("server", "outsider"),
    }
    assert {trial.mechanism.target_epsilon for trial in trials} == {8.0}


def test_an_outsider_sees_the_noisy_mean_and_the_server_each_upload() -> None:
    """What the outsider meets is as if each upload had its share of the central noise."""
    for listener, clients in (("outsider", 4), ("honest-but-curious-server", 1), ("secure-aggregation", 4)):
        run = experiment(
            mechanism={**CENTRAL, "sigma": 30.0},
            federation={"weighting": "uniform"},
            data={"train_examples": 80},
            adversary={"attacks": ["iga"], "victims": 1, "threat_model": listener},
        )
        world = build_world(run)
        zero = State({name: torch.zeros_like(value) for name, value in world.initial.parameters.items()}, {})
        uploads = tuple(Upload(client, 20, zero) for client in range(4))
        (heard,) = observe(world, 1, world.initial, uploads, CentralNoise(world).mean(1, uploads))
        outside = listener == "outsider"
        assert heard.settings.clients == clients
        assert any(bool(value.any()) for value in heard.upload.values()) == outside
        mechanism = heard.settings.mechanism
        assert mechanism["name"] == ("gaussian" if outside else "central")
        # Averaged over four uploads, their noise is sigma C / 4 again.
        assert mechanism["sigma"] == pytest.approx(15.0 if outside else 30.0)


@pytest.mark.parametrize(
    ("mechanism", "federation", "key"),
    [
        (CENTRAL, {"weighting": "examples"}, "weighting"),
        (CENTRAL, {"secure_aggregation": True}, "secure_aggregation"),
        (CENTRAL, {"aggregation": "median"}, "aggregation"),
        (CENTRAL, {"target_epsilon": 9.0}, "target_epsilon"),
        ({"name": "distributed", "sigma": 1.0}, {"secure_aggregation": False}, "secure_aggregation"),
        ({"name": "distributed", "sigma": 1.0, "survivors": 2}, {}, "survivors = 2: .* allowed are 3 to 4"),
        ({"name": "distributed", "sigma": 1.0, "survivors": 5}, {}, "survivors = 5: .* allowed are 3 to 4"),
        ({"name": "gaussian", "sigma": 1.0}, {"client_sampling": "poisson"}, "client_sampling"),
        ({"name": "correlated", "sigma": 1.0, "band": 4}, {"rounds": 3}, "band = 4: at most federation.rounds = 3"),
        (
            {"name": "correlated", "sigma": 1.0, "separation": 2},
            {"client_sampling": "fixed"},
            "separation = 2: at most",
        ),
        ({"name": "correlated", "sigma": 1.0, "separation": 2}, {}, "separation = 2: at most 1"),
        ({"name": "correlated", "sigma": 1.0, "participations": 1}, {"rounds": 3}, "participations = 1: at least 3"),
        ({"name": "correlated", "sigma": 1.0, "unit": "example"}, {"algorithm": "fedavg"}, "unit = 'example'"),
    ],
)
def test_settings_that_prove_nothing_are_refused(
    mechanism: dict[str, object], federation: dict[str, object], key: str
) -> None:
    with pytest.raises(ValueError, match=key):
        settings(mechanism, **federation)
