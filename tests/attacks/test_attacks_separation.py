"""Batches from a first layer's gradient, against the images themselves, random matrices and the network's own units."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attack_victims import MEAN, STD, digits, example_gradients, mlp, normalise, observe
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.methods.custom import CustomSettings
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.methods.map import MapSettings
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, OtherBatches, Reconstruction, run_attack, stackable
from fedpriv.attacks.reconstruction.first_layer.batch import (
    FALSE_ALARM,
    Spectrum,
    certify,
    noise_edge,
    polish,
    scaled,
    take_apart,
    unmix,
)
from tests.cases import in_one_test

CONFIG = ClosedFormSettings()
WIDE = (400, 32)


def attack(heard: Any, model: Any, config: Any = CONFIG, **changes: Any) -> Reconstruction:
    (found,) = run_attack(AttackJob(config.name, [heard], model, config, 0, **changes))
    return found


def paired(found: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """Mean squared errors of the pairs, and the number of the true image for each found one."""
    apart = torch.cdist(truth.flatten(1).double(), found.flatten(1).double()).square() / truth[0].numel()
    rows, columns = linear_sum_assignment(apart.T.numpy())
    assert rows.tolist() == list(range(len(found)))
    return apart[columns, rows], torch.from_numpy(columns)


# ---- the noise edge ----


@in_one_test(("rows", "columns", "deviation"), [(40, 65, 1.0), (100, 30, 1e-3), (64, 64, 7.0)])
def test_noise_alone_stays_below_the_edge(rows: int, columns: int, deviation: float) -> None:
    """200 random matrices; that one of them is above by chance has a probability below 2e-4. The edge is not lax: the
    largest value is on average at 0.8 of it at least (Bai and Yin 1993: at sqrt(rows) + sqrt(columns) in the limit).
    """
    rng = np.random.default_rng(5)
    largest = [np.linalg.norm(deviation * rng.standard_normal((rows, columns)), 2) for _ in range(200)]
    edge = noise_edge(rows, columns, deviation)
    assert max(largest) < edge
    assert float(np.mean(largest)) > 0.8 * edge * (1 - math.sqrt(-2 * math.log(FALSE_ALARM)) / 40)


@pytest.mark.parametrize("told", [True, False])
def test_images_above_the_noise_are_counted(told: bool) -> None:
    """Singular values 3 and 2 times the edge count, one of half of it does not, whether or not the noise is public."""
    generator = torch.Generator().manual_seed(1)
    left, _ = torch.linalg.qr(torch.randn(120, 3, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(90, 3, generator=generator, dtype=torch.float64))
    edge = noise_edge(120, 90, 0.1)
    noise = 0.1 * torch.randn(120, 90, generator=generator, dtype=torch.float64)
    matrix = left @ torch.diag(torch.tensor([3 * edge, 2 * edge, edge / 2]).double()) @ right.mT + noise
    found = take_apart(matrix, 0.1 if told else 0.0, 3)
    assert found.examples == 2
    assert found.deviation == pytest.approx(0.1, rel=0.1)
    rest = matrix - found.left @ found.scaled
    assert float(torch.linalg.matrix_norm(rest, 2)) < edge


def mixed(ends: list[float]) -> Spectrum:
    """Two images of one pixel, as far as their ends go, seen through a mixing."""
    last = torch.tensor(ends, dtype=torch.float64)
    right = torch.stack([torch.zeros(2, dtype=torch.float64), last], dim=1)
    return Spectrum(torch.eye(2).double(), torch.ones(2).double(), right, 0.0, 0.0, 1.0, 0.0)


def test_a_mixing_is_scaled_to_images_that_end_in_one() -> None:
    mixing = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    found = scaled(mixed([4.0, 2.0]), mixing)
    assert found is not None
    torch.testing.assert_close(torch.linalg.solve(found, mixed([4.0, 2.0]).scaled)[:, -1], torch.ones(2).double())
    assert scaled(mixed([1.0, 1.0]), mixing) is None  # one image would have to end in 0


@in_one_test(
    ("mixing", "ends"),
    [
        ([[6.0, 8.0], [5.0, 6.666666666666666]], [50.0, 41.666666666666664]),
        ([[3.0, 2.0], [5.0, 3.333333333333333]], [25.0, 41.666666666666664]),
        ([[9.0, 4.0], [3.0, 1.3333333333333335]], [83.0, 27.666666666666668]),
        ([[7.0, 4.0], [2.0, 1.142857142857143]], [52.0, 14.857142857142858]),
    ],
)
def test_a_mixing_that_scaling_makes_singular_is_none(mixing: list[list[float]], ends: list[float]) -> None:
    """It can be inverted, its columns times the scale cannot: whoever solves with them would end the run."""
    given = torch.tensor(mixing, dtype=torch.float64)
    assert not int(torch.linalg.inv_ex(given).info)
    found = scaled(mixed(ends), given)
    assert found is None or not int(torch.linalg.inv_ex(found).info)


def test_large_matrices_have_the_same_spectrum() -> None:
    """Subspace iteration against numpy's singular values."""
    generator = torch.Generator().manual_seed(2)
    matrix = torch.randn(600, 5, generator=generator) @ torch.randn(5, 560, generator=generator)
    noisy = matrix + 0.01 * torch.randn(600, 560, generator=generator)
    found = take_apart(noisy, 0.01, 5)
    expected = np.linalg.svd(noisy.double().numpy(), compute_uv=False)[:5]
    np.testing.assert_allclose(found.values.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("rows", [30, 700])
def test_a_matrix_of_zeros_has_nothing_and_one_that_is_not_finite_is_refused(rows: int) -> None:
    assert take_apart(torch.zeros(rows, 600), 0.0, 2).examples == 0
    with pytest.raises(ValueError, match="not finite"):
        take_apart(torch.full((rows, 600), torch.nan), 0.0, 2)


# ---- parts ----


def test_sparse_rows_are_unmixed() -> None:
    """Known images with sparse differences, mixed at random: each row of the answer is one of them, nearly."""
    generator = torch.Generator().manual_seed(3)
    jumps = torch.randn(4, 2, 24, 24, generator=generator).double() ** 5
    images = jumps.cumsum(dim=2).cumsum(dim=3).flatten(1)
    mixed = torch.randn(4, 4, generator=generator).double() @ images
    found = unmix(mixed, (2, 24, 24), noisy=False) @ mixed
    cosines = torch.nn.functional.cosine_similarity(found[:, None], images[None], dim=2).abs()
    assert sorted(cosines.argmax(dim=1).tolist()) == [0, 1, 2, 3]
    assert float(cosines.amax(dim=1).min()) > 0.98


def test_the_certificate_is_one_for_the_truth_alone() -> None:
    model = mlp("relu", WIDE).double()
    images, labels = digits()
    x = normalise(images[:5]).double()
    errors = example_gradients(model, x, labels[:5])["hidden1.bias"].T
    outputs = model.hidden1(x.flatten(1)).detach()
    noise = torch.full((5,), 1e-12).double()
    right = certify(errors, noise, outputs)
    assert (right.share, right.disagreeing, right.pairs) == (1.0, 0, 2000)
    moved = certify(errors, noise, model.hidden1(x.flatten(1).roll(1, dims=0)).detach())
    assert 0.5 < moved.share < 0.95
    assert moved.disagreeing == int(((errors.T == 0) != (outputs.roll(1, dims=0) <= 0)).sum())


def test_an_example_may_be_missing_from_a_round() -> None:
    outputs = torch.tensor([[1.0, -1.0, 1.0, 1.0]])
    errors = torch.tensor([[0.3], [0.0], [0.0], [0.0]])
    assert certify(errors, torch.zeros(1), outputs, rounds=2).disagreeing == 0
    assert certify(errors, torch.zeros(1), outputs, rounds=1).disagreeing == 2


def test_polishing_solves_a_known_problem() -> None:
    """Errors that are a known smooth function of the images; the start is off by several per cent."""
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(50, 30, generator=generator).double() / 6
    images = torch.randn(4, 30, generator=generator).double()

    def errors(batches: Tensor) -> Tensor:
        return 1 - torch.tanh(batches @ weight.mT).square() + 0.1 * torch.arange(4).double()[:, None].cos()

    homogeneous = torch.cat([images, torch.ones(4, 1).double()], dim=1)
    spectrum = take_apart(errors(images[None])[0].mT @ homogeneous, 0.0, 4)
    truth = spectrum.left.mT @ errors(images[None])[0].mT
    start = scaled(spectrum, truth * (1 + 0.05 * torch.randn(4, 4, generator=generator).double()))
    assert start is not None
    found = polish(spectrum, start, errors)
    torch.testing.assert_close(found.mixing, truth, rtol=1e-6, atol=1e-9)
    assert found.misfit < 1e-18


# ---- whole batches ----


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_batches_are_exact_with_their_labels(activation: str, count: int) -> None:
    images, labels = digits()
    rows = list(range(20, 20 + count))
    model = mlp(activation, WIDE)
    found = attack(observe(model, images[rows], labels[rows]), model)
    errors, order = paired(found.images, images[rows])
    assert float(errors.max()) < 1e-8
    assert found.labels.tolist() == labels[rows][order].tolist()
    assert f"{count} images above the noise edge" in found.note
    assert ("certificate 1.0000 (0 of" in found.note) == (activation == "relu")


@in_one_test("activation", ["relu", "tanh"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("sigma", [1e-4, 1e-3])
def test_noise_leaves_images_and_labels(activation: str, count: int, sigma: float) -> None:
    """The bar is three times the error of least squares given the true errors, which no unbiased answer falls below."""
    images, labels = digits()
    rows = list(range(40, 40 + count))
    model = mlp(activation, WIDE)
    mechanism = {"name": "gaussian", "sigma": sigma, "clip_norm": 1.0}
    found = attack(observe(model, images[rows], labels[rows], mechanism=mechanism), model, public_images=images[800:])
    gradients = example_gradients(model, normalise(images[rows]), labels[rows])
    norms = torch.stack([value.flatten(1).square().sum(dim=1) for value in gradients.values()]).sum(dim=0).sqrt()
    exact = (gradients["hidden1.bias"] * (1 / norms).clamp(max=1)[:, None]).double()
    covariance = torch.linalg.inv(exact @ exact.T) * sigma**2 * STD**2
    errors, order = paired(found.images, images[rows])
    assert float(errors.mean()) < 3 * float(covariance.diagonal().mean()) + 1e-6
    assert found.labels.tolist() == labels[rows][order].tolist()


def test_known_labels_go_to_their_images() -> None:
    images, labels = digits()
    rows = [3, 13, 23, 8]
    model = mlp("relu", WIDE)
    heard = replace(observe(model, images[rows], labels[rows]), labels=tuple(sorted(labels[rows].tolist())))
    found = attack(heard, model)
    _, order = paired(found.images, images[rows])
    assert found.labels.tolist() == labels[rows][order].tolist()


def test_the_number_of_images_is_read_where_it_is_not_the_public_one() -> None:
    """Poisson batches: 2 or 5 images where 4 are expected."""
    images, labels = digits()
    model = mlp("relu", WIDE)
    for rows in ([20, 21], [20, 21, 22, 23, 24]):
        heard = observe(model, images[rows], labels[rows], batch_size=4)
        found = attack(heard, model)
        assert found.images.shape[0] == len(rows)
        assert float(paired(found.images, images[rows])[0].max()) < 1e-8


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_an_image_twice_is_one(activation: str) -> None:
    images, labels = digits()
    rows = [4, 4, 6]
    model = mlp(activation, WIDE)
    found = attack(observe(model, images[rows], labels[rows]), model)
    assert len(found.images) == 2
    assert "2 images above the noise edge (public number: 3)" in found.note
    bar = 1e-8 if activation == "relu" else 0.02  # the network's errors are not those of two images
    assert float(paired(found.images, images[[4, 6]])[0].max()) < bar


def test_an_image_between_two_others_is_no_harm_to_what_is_claimed() -> None:
    """Collinear: three images in a plane of two. No certificate of 1 is given for what is not the truth."""
    images, labels = digits()
    batch = torch.stack([images[4], images[6], (images[4] + images[6]) / 2])
    model = mlp("relu", WIDE)
    found = attack(observe(model, batch, labels[[4, 6, 6]]), model)
    assert len(found.images) == 2
    assert "certificate 1.0000" not in found.note
    assert "the images are not proven" in found.note


@pytest.mark.parametrize("sent", [torch.float16, torch.bfloat16])
def test_uploads_of_few_digits_are_read(sent: torch.dtype) -> None:
    images, labels = digits()
    rows = list(range(60, 64))
    model = mlp("relu", WIDE)
    heard = observe(model, images[rows], labels[rows])
    rounded = replace(heard, upload={name: value.to(sent).float() for name, value in heard.upload.items()})
    found = attack(rounded, model)
    errors, _ = paired(found.images, images[rows])
    assert float(errors.mean()) < (1e-4 if sent is torch.float16 else 5e-3)


def test_a_zero_gradient_is_refused_in_a_line() -> None:
    images, labels = digits()
    model = mlp("relu", WIDE)
    heard = observe(model, images[:3], labels[:3])
    empty = replace(heard, upload={name: torch.zeros_like(value) for name, value in heard.upload.items()})
    result = attack_each(AttackJob("closed_form", [empty], model, CONFIG, 0))
    assert "no image of the batch stands above the noise" in result.failures[0]
    assert "\n" not in result.failures[0]


def test_the_same_twice() -> None:
    images, labels = digits()
    model = mlp("relu", WIDE)
    heard = observe(model, images[10:14], labels[10:14])
    assert torch.equal(attack(heard, model).images, attack(heard, model).images)


@pytest.mark.parametrize(
    "config",
    [CustomSettings(start="closed-form", iterations=3), IgaSettings(start="closed-form", iterations=3)],
    ids=["custom", "iga"],
)
def test_other_attacks_start_there_with_the_labels_of_the_images(config: Any) -> None:
    images, labels = digits()
    rows = [29, 5, 17, 11]
    model = mlp("tanh", WIDE)
    found = attack(observe(model, images[rows], labels[rows]), model, config)
    errors, order = paired(found.images, images[rows])
    assert float(errors.max()) < 1e-8  # the start has the lowest loss of its own
    assert found.labels.tolist() == labels[rows][order].tolist()


def test_map_ends_there() -> None:
    images, labels = digits()
    rows = [29, 5, 17, 11]
    model = mlp("tanh", (128,))
    found = attack(observe(model, images[rows], labels[rows]), model, MapSettings(iterations=6))
    errors, order = paired(found.images, images[rows])
    assert float(errors.max()) < 1e-4
    assert found.labels.tolist() == labels[rows][order].tolist()


# ---- several rounds ----


def rounds(activation: str, count: int, batches: list[list[int]]) -> tuple[Any, OtherBatches]:
    """A client of digits 100 to 100 + count that sends these batches of them, while the model moves."""
    images, labels = digits()
    model = mlp(activation, (128,))
    heard: list[Observation] = []
    for number, rows in enumerate(batches, start=1):
        chosen = [100 + row for row in rows]
        heard.append(observe(model, images[chosen], labels[chosen], round_number=number, client_examples=count))
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.sub_(0.02 * heard[-1].upload[name])
    return model, OtherBatches(tuple(heard))


@pytest.mark.parametrize(("activation", "images", "size"), [("relu", 6, 3), ("tanh", 4, 2)])
def test_rounds_of_other_batches_show_all_images(activation: str, images: int, size: int) -> None:
    generator = torch.Generator().manual_seed(6)
    batches = [torch.randperm(images, generator=generator)[:size].tolist() for _ in range(10)]
    model, heard = rounds(activation, images, batches)
    assert stackable(heard.observations)
    found = attack(heard, model)
    truth, labels = digits()[0][100 : 100 + images], digits()[1][100 : 100 + images]
    errors, order = paired(found.images, truth)
    assert len(found.images) == images
    assert float(errors.max()) < 1e-8
    assert found.labels.tolist() == labels[order].tolist()
    assert "uploads of other batches of" in found.note


def test_an_image_that_was_in_no_round_is_not_found() -> None:
    model, heard = rounds("relu", 5, [[0, 1], [1, 2], [2, 3], [3, 0], [1, 3]])
    found = attack(heard, model)
    assert len(found.images) == 4
    errors, order = paired(found.images, digits()[0][100:105])
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    assert float(errors.max()) < 1e-8
    assert "4 images above the noise edge (public number: 5)" in found.note


def test_what_cannot_be_stacked_is_told() -> None:
    model, heard = rounds("relu", 4, [[0, 1], [2, 3]])
    with pytest.raises(AttackRefused, match="iga matches one batch; uploads of other batches"):
        run_attack(AttackJob("iga", [heard], model, IgaSettings(iterations=1), 0))
    strange = replace(heard.observations[1], client=7)
    assert not stackable((heard.observations[0], strange))
    assert not stackable(heard.observations[:1])
    with pytest.raises(AttackRefused, match="clients 0 and 7"):
        run_attack(AttackJob("closed_form", [OtherBatches((heard.observations[0], strange))], model, CONFIG, 0))
    assert MEAN < 1
