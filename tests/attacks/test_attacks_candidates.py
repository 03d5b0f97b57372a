"""The candidate attack and the best decision, against literal likelihoods, closed forms and each other."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attack_victims import digits, example_gradients, lenet, mlp, normalise, observe
from scipy import stats
from test_attacks_likelihood import MECHANISMS, clipped, heard_digits, literal
from torch import Tensor, nn

from fedpriv.accounting import ceilings, release_with
from fedpriv.attacks import reconstruct
from fedpriv.attacks.campaign import Campaign, attack_each
from fedpriv.attacks.methods.candidate import CandidateSettings
from fedpriv.attacks.observation import CandidateLists, Observation
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, best_decisions
from fedpriv.attacks.reconstruction.candidates import batch_log_likelihoods
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.scene import Scene
from fedpriv.attacks.reconstruction.upload_model import prepare_victims
from fedpriv.core.errors import InputError
from fedpriv.core.randomness import Secret
from fedpriv.mechanisms import mechanism_settings
from tests.cases import in_one_test

IMAGES, LABELS = digits()
SMALL = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def records(first: int = 0, count: int = 12) -> tuple[Tensor, Tensor]:
    return IMAGES[first : first + count], LABELS[first : first + count]


def given(heard: Observation, images: Tensor, labels: Tensor, examples: int = 1) -> Observation:
    return replace(heard, candidates=CandidateLists.of_all(images, labels, examples))


def attack(model: nn.Module, heard: list[Any], **settings: Any) -> Campaign:
    return attack_each(
        AttackJob("candidate", heard, model, CandidateSettings(**settings), 1, public_images=IMAGES[900:])
    )


def picked(campaign: Campaign, images: Tensor) -> list[int]:
    """The number of the record that each reconstruction is."""
    made = [campaign.found[number].images[0] for number in range(len(campaign.found))]
    return [int((images - image).square().flatten(1).sum(dim=1).argmin()) for image in made]


@pytest.mark.parametrize(
    ("mechanism", "labels"),
    [(mechanism, ("given", "unknown")[place % 2]) for place, mechanism in enumerate(MECHANISMS.values())],
    ids=MECHANISMS,
)
def test_the_pick_maximises_the_literal_likelihood(mechanism: dict[str, Any], labels: str) -> None:
    """With labels that are not known, the likelihoods of all classes are added."""
    model = mlp().double()
    images, classes = records()
    heard = [given(each, images, classes) for each in heard_digits(model, mechanism, 3)]
    campaign = attack(model, heard, labels=labels)
    for number, observation in enumerate(heard):
        table = torch.full((12, 10), -torch.inf, dtype=torch.float64)
        for record in range(12):
            for label in [int(classes[record])] if labels == "given" else range(10):
                x = normalise(images[[record]]).double()
                table[record, label] = -literal(model, observation, x, torch.tensor([label])).detach()
        posterior = table.logsumexp(dim=1).softmax(dim=0)
        result = campaign.found[number]
        assert picked(campaign, images)[number] == int(posterior.argmax())
        assert result.attempts[0].loss == pytest.approx(-math.log(float(posterior.max())), rel=1e-5, abs=1e-6)
        assert int(result.attempts[0].labels[0]) == int(table[int(posterior.argmax())].argmax())
        assert result.picked


def test_several_uploads_of_one_image_add_up() -> None:
    """The joint posterior of two rounds, from other parameters, is the product of theirs."""
    mechanism = {"name": "gaussian", "sigma": 3.0, "clip_norm": 1.0}
    images, classes = records()
    first, second = (
        given(observe(mlp(seed=seed), images[:1], classes[:1], mechanism=mechanism, noise_seed=seed, round_number=seed),
              images, classes)
        for seed in (1, 2)
    )  # fmt: skip
    each = torch.zeros(12, dtype=torch.float64)
    for seed, heard in ((1, first), (2, second)):
        model = mlp(seed=seed).double()
        double = replace(heard, parameters={name: value.double() for name, value in heard.parameters.items()})
        each += torch.tensor(
            [-float(literal(model, double, normalise(images[[k]]).double(), classes[[k]]).detach()) for k in range(12)]
        )
    together = attack(mlp(), [(first, second)])
    assert picked(together, images) == [int(each.argmax())]
    assert together.found[0].attempts[0].loss == pytest.approx(-float(each.log_softmax(0).max()), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("make", "mechanism"),
    [
        (partial(mlp, hidden=(16,)), {"name": "gaussian", "sigma": 0.3, "clip_norm": 1.0}),
        (lenet, {"name": "vmf", "kappa": 60.0}),
    ],
    ids=["mlp, gaussian", "lenet, vmf"],
)
def test_the_attack_reaches_the_best_decision(make: Callable[[], nn.Module], mechanism: dict[str, Any]) -> None:
    """200 uploads, each of another record in turn: the share that is told, against the best decision's.

    Two-sided binomial tests at 1e-4, twice: 0.02 % of false alarms.
    """
    model = make()
    images, classes = records(count=20)
    built = mechanism_settings(mechanism).mechanism()
    gradients = example_gradients(model, normalise(images), classes)
    base = observe(model, images[:1], classes[:1], mechanism=mechanism)
    noise = Secret.of_seed(5).stream("test")
    sources = [number % 20 for number in range(200)]
    heard = []
    for number, source in enumerate(sources):
        row = {name: value[[source]] for name, value in gradients.items()}
        upload = built.release(_dense(row), 1, noise)
        heard.append(given(replace(base, client=number, upload=upload), images, classes))
    told = sum(one == other for one, other in zip(picked(attack(model, heard), images), sources, strict=True))
    candidates = CandidateLists.of_all(images, classes, 1)
    (optimum,) = best_decisions(model, base, candidates, images[:1], classes[:1], 3)
    best = optimum.right / optimum.draws
    assert 0.1 < best < 0.95
    assert stats.binomtest(told, 200, best).pvalue > 1e-4


def _dense(rows: dict[str, Tensor]) -> Any:
    from fedpriv.gradients import DenseGradients

    return DenseGradients(rows)


@in_one_test("sigma", [0.3, 1.0, 3.0])
@in_one_test("clipping", ["flat", "layer"])
def test_of_two_records_behind_normal_noise_it_is_known(sigma: float, clipping: str) -> None:
    """Phi(d / (2 sigma)), d the distance of the clipped gradients; the exact interval of 4,000 draws at 99.99 %."""
    mechanism = {"name": "gaussian", "sigma": sigma, "clip_norm": 1.0, "clipping": clipping}
    images, classes = records(count=2)
    heard = observe(SMALL, images[:1], classes[:1], mechanism=mechanism)
    (optimum,) = best_decisions(SMALL, heard, CandidateLists.of_all(images, classes, 1), images[:1], classes[:1], 1)
    gradients = example_gradients(SMALL, normalise(images), classes)
    sent = [clipped([value[k] for value in gradients.values()], mechanism, torch.ones(650)) for k in range(2)]
    wanted = stats.norm.cdf(float((sent[0] - sent[1]).norm()) / (2 * sigma))
    low, high = stats.binomtest(optimum.right, optimum.draws).proportion_ci(0.9999, method="exact")
    assert low <= wanted <= high


@pytest.mark.parametrize("name", ["gaussian", "vmf by layer"])
def test_inner_products_and_whole_draws_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways to the same figure: Fisher's exact test at 1e-4, twice."""
    images, classes = records(count=10)
    mechanism = {**MECHANISMS[name], **({"sigma": 0.8} if name == "gaussian" else {})}
    heard = observe(SMALL, images[:1], classes[:1], mechanism=mechanism)
    about = SMALL, heard, CandidateLists.of_all(images, classes, 1), images[:1], classes[:1]
    (drawn,) = best_decisions(*about, 1)
    built = type(mechanism_settings(mechanism).mechanism())
    monkeypatch.setattr(built, "draw_products", lambda *_: None)
    (whole,) = best_decisions(*about, 1)
    assert whole.draws < drawn.draws
    table = [[one.right, one.draws - one.right] for one in (drawn, whole)]
    assert stats.fisher_exact(table).pvalue > 1e-4


@pytest.mark.parametrize(
    ("name", "strength"),
    [(name, (0.2, 1.0, 5.0)[place % 3]) for place, name in enumerate(name for name in MECHANISMS if name != "hgm")],
)
def test_the_best_decision_stays_below_the_ceiling(name: str, strength: float) -> None:
    """More noise and less, all mechanisms: its lower 99.99 % limit is not above what no attack exceeds."""
    settings = dict(MECHANISMS[name])
    key = next(key for key in ("sigma", "scale", "kappa") if key in settings)
    settings[key] *= strength
    images, classes = records(count=10)
    heard = observe(SMALL, images[:1], classes[:1], mechanism=settings)
    (optimum,) = best_decisions(SMALL, heard, CandidateLists.of_all(images, classes, 1), images[:1], classes[:1], 1)
    config = mechanism_settings(settings)
    release = release_with(
        settings[key], 1e-5, mechanism=settings["name"], sampling="full", rate=1.0, participations=1,
        dimensions=config.dimensions((640, 10)),
    )  # fmt: skip
    (ceiling,) = ceilings(release, [1 / 10])
    low = stats.binomtest(optimum.right, optimum.draws).proportion_ci(0.9998, method="exact").low
    assert ceiling.gamma is not None
    assert low <= ceiling.gamma


def test_in_a_batch_the_others_are_a_normal_sum() -> None:
    """Against the textbook's multivariate normal density, with the covariance written out."""
    mechanism = {"name": "gaussian", "sigma": 0.5, "clip_norm": 1.0}
    model = SMALL.double()
    heard = observe(model, IMAGES[:4], LABELS[:4], mechanism=mechanism)
    network = Network(model)
    (victim,) = prepare_victims([heard], network.names, network.device)
    scene = Scene.of(network, heard.settings, torch.float64, IMAGES[600:])
    images, labels = normalise(IMAGES[:6]).double(), LABELS[:6]
    found = batch_log_likelihoods(scene, victim, images, labels)

    from fedpriv.attacks.reconstruction import candidates

    public = candidates._public_images(scene)
    given_labels = candidates._public_labels(scene, victim, len(public))
    ones = torch.ones(650, dtype=torch.float64)
    added = [
        torch.stack([clipped([value[k] for value in rows.values()], mechanism, ones) for k in range(len(x))]) / 4
        for x, y in ((images, labels), (public, given_labels))
        for rows in [example_gradients(model, x, y)]
    ]
    held = torch.arange(len(public)) % 5 == 4
    fitted, tests = added[1][~held], added[1][held]
    mean = fitted.mean(dim=0)
    _, singular, directions = torch.linalg.svd(fitted - mean, full_matrices=False)
    kept = singular > singular[0] * 1e-6
    variances, basis = singular[kept].square() / (len(fitted) - 1), directions[kept].mT
    offsets = tests - mean
    rest = (offsets.square().sum(1) - (offsets @ basis).square().sum(1)).mean() / (650 - basis.shape[1])
    inside = basis @ torch.diag(variances.clamp(min=float(rest)) - rest) @ basis.mT
    covariance = 3 * (inside + rest * torch.eye(650)) + (0.5 / 4) ** 2 * torch.eye(650)
    upload = torch.cat([value.flatten() for value in heard.upload.values()])
    density = stats.multivariate_normal(mean=torch.zeros(650).numpy(), cov=covariance.numpy())
    wanted = torch.tensor([density.logpdf((upload - 3 * mean - one).numpy()) for one in added[0]])
    assert torch.allclose(found - found[0], wanted - wanted[0], rtol=1e-6, atol=1e-6)
    SMALL.float()


def test_batches_are_told_from_their_lists() -> None:
    """Four images, each with a list of its own, in random order, behind noise that leaves no doubt."""
    images, labels = records(count=40)
    lists = torch.stack([torch.cat([torch.tensor([k]), torch.arange(4, 40)]) for k in range(4)])
    heard = observe(mlp(), images[:4], labels[:4], mechanism={"name": "gaussian", "sigma": 1e-3, "clip_norm": 1.0})
    campaign = attack(mlp(), [replace(heard, candidates=CandidateLists(images, labels, lists))])
    assert torch.allclose(campaign.found[0].images, images[:4], atol=1e-6)


class TestRefusals:
    def test_no_list(self) -> None:
        heard = observe(SMALL, IMAGES[:1], LABELS[:1])
        assert "none is given" in attack(SMALL, [heard]).failures[0]

    def test_another_shape(self) -> None:
        heard = given(observe(SMALL, IMAGES[:1], LABELS[:1]), torch.rand(3, 1, 4, 4), LABELS[:3])
        assert "records have the shape (1, 4, 4), the upload's images (1, 8, 8)" in attack(SMALL, [heard]).failures[0]

    def test_lists_for_another_number_of_images(self) -> None:
        heard = given(observe(SMALL, IMAGES[:2], LABELS[:2]), *records(), examples=1)
        assert "1 lists of records for an upload of 2 images" in attack(SMALL, [heard]).failures[0]

    def test_fewer_records_than_images(self) -> None:
        heard = given(observe(SMALL, IMAGES[:4], LABELS[:4]), IMAGES[:3], LABELS[:3], examples=4)
        assert "3 records for 4 images: there are too few" in attack(SMALL, [heard]).failures[0]

    def test_more_records_than_are_compared_in_a_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fedpriv.attacks.reconstruction.candidates.MOST_RECORDS", 2)
        heard = given(observe(SMALL, IMAGES[:2], LABELS[:2]), IMAGES[:3], LABELS[:3], examples=2)
        assert "3 records, one for each class that it may have, in a batch of 2" in attack(SMALL, [heard]).failures[0]

    def test_a_batch_of_several_steps(self) -> None:
        heard = observe(SMALL, IMAGES[:2], LABELS[:2], algorithm="fedavg", local_steps=3, client_examples=2)
        assert "not from an upload of several steps" in attack(SMALL, [given(heard, *records(), 2)]).failures[0]

    def test_labels_that_are_ruled_out(self) -> None:
        heard = replace(observe(SMALL, IMAGES[:1], LABELS[:1]), labels=(9,))
        failures = attack(SMALL, [given(heard, IMAGES[:3], torch.tensor([1, 2, 3]))]).failures
        assert "no record has a label that is among those of the upload" in failures[0]

    @pytest.mark.parametrize(
        ("lists", "reason"),
        [([[0]], "N of 2 or more"), ([[0, 3]], "not from 0 to 2"), ([[1, 1]], "names a record twice")],
    )
    def test_lists(self, lists: list[list[int]], reason: str) -> None:
        with pytest.raises(InputError, match=reason):
            CandidateLists(IMAGES[:3], LABELS[:3], torch.tensor(lists))

    def test_the_same_record_twice(self) -> None:
        with pytest.raises(InputError, match="records 1 and 3 are the same"):
            CandidateLists.of_all(IMAGES[[0, 1, 2, 1]], LABELS[:4], 1)

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"mechanism": {"name": "none"}}, "there is none"),
            ({"clients": 2}, "not for a sum"),
            ({"algorithm": "fedavg", "local_steps": 2}, "not for several local steps"),
        ],
        ids=["none", "sum", "steps"],
    )
    def test_the_best_decision(self, changes: dict[str, Any], reason: str) -> None:
        mechanism = {"name": "gaussian", "sigma": 1.0, "clip_norm": 1.0}
        heard = observe(SMALL, IMAGES[:1], LABELS[:1], **{"mechanism": mechanism, **changes})
        with pytest.raises(AttackRefused, match=reason):
            best_decisions(SMALL, heard, CandidateLists.of_all(*records(), 1), IMAGES[:1], LABELS[:1], 1)


class TestOwnModel:
    """Records of somebody's own, through the function that needs nothing else of this project."""

    @staticmethod
    def upload(numbers: list[int]) -> list[Tensor]:
        loss = F.cross_entropy(SMALL(IMAGES[numbers]), LABELS[numbers])
        return list(torch.autograd.grad(loss, list(SMALL.parameters())))

    @pytest.mark.parametrize("batch", [1, 3])
    def test_it_picks(self, batch: int) -> None:
        images, labels = records()
        result = reconstruct(
            SMALL, F.cross_entropy, self.upload(list(range(batch))), (1, 8, 8), attack="candidate", batch_size=batch,
            candidates=images, candidate_labels=labels.tolist(), public_images=IMAGES[900:],
        )  # fmt: skip
        found = {int((images - image).square().flatten(1).sum(1).argmin()) for image in result.images}
        assert found == set(range(batch))

    def test_without_labels_all_classes_are_weighed(self) -> None:
        images, _ = records()
        result = reconstruct(SMALL, F.cross_entropy, self.upload([0]), (1, 8, 8), attack="candidate", candidates=images)
        assert torch.allclose(result.images[0], images[0], atol=1e-6)
        assert result.labels.tolist() == [int(LABELS[0])]
        assert "probability of the pick 1" in result.note

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ({}, "none is given"),
            ({"candidates": IMAGES[:1], "candidate_labels": [1]}, "1 record; expected 2 or more"),
            ({"candidates": IMAGES[:3], "attack": "map"}, "the attack map takes none"),
            ({"candidates": IMAGES[:3], "candidate_labels": [1, 2, 10]}, "expected numbers from 0 to 9; given is 10"),
            (
                {"candidates": IMAGES[:3], "candidate_labels": [1.5] * 99},
                r"= \[1.5, .{10,200}\.\.\.: expected whole",
            ),
            ({"candidates": IMAGES[:3], "candidate_labels": [1, 2]}, "2 candidate_labels for 3 examples"),
            ({"candidates": torch.rand(3, 1, 4, 4), "candidate_labels": [1, 2, 3]}, r"candidates has the shape"),
            ({"candidates": IMAGES[[1, 1]], "candidate_labels": [1, 2]}, "records 0 and 1 are the same"),
        ],
    )
    def test_what_is_refused(self, arguments: dict[str, Any], reason: str) -> None:
        with pytest.raises(InputError, match=reason):
            reconstruct(SMALL, F.cross_entropy, self.upload([0]), (1, 8, 8), **{"attack": "candidate", **arguments})
