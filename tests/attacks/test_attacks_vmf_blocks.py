"""Images read off von Mises-Fisher draws on blocks of a size: how rows are cut, the filter, and what comes out."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from attack_victims import MEAN, STD, digits, errors, lenet, mlp, normalise, observe, observe_digits
from torch import Tensor, nn

from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.reconstruction import AttackJob, run_attack
from fedpriv.attacks.reconstruction.first_layer.closed_form import (
    HeardBlocks,
    LengthSearch,
    PixelFilter,
    Units,
    heard_blocks,
)
from fedpriv.attacks.reconstruction.priors import GaussianPrior, fit_prior
from fedpriv.core.randomness import numpy_stream
from fedpriv.mechanisms.machinery.vmf_sampling import draw_cosines
from tests.cases import in_one_test

CONFIG = ClosedFormSettings()
PUBLIC = digits()[0][800:]
PIXELS = 64


@lru_cache
def prior() -> GaussianPrior:
    return fit_prior(normalise(PUBLIC).double())


def image_of(number: int) -> Tensor:
    return normalise(digits()[0][number]).double().flatten()


def draws(image: Tensor, errors_of_rows: Tensor, offset: int, length: int, kappa: float, after: int = 40) -> Tensor:
    """Rows e_i x (m, P) of which each block of the whole vector is drawn anew, one block after the other."""
    rng = numpy_stream(3, "test draws")
    vector = torch.cat([torch.ones(offset).double(), torch.outer(errors_of_rows, image).flatten(), torch.ones(after)])
    for start in range(0, len(vector), length):
        block = vector[start : start + length]
        size = float(block.norm())
        noise, other = torch.from_numpy(rng.normal(size=(2, len(block))))
        mean = block / size if size else other / other.norm()
        across = noise - (noise @ mean) * mean
        drawn = draw_cosines(kappa if size else 0.0, len(block), 1, rng)
        block.copy_(drawn.cosine[0] * mean + (drawn.sine[0] * across / across.norm() if len(block) > 1 else 0))
    return vector[offset : offset + len(errors_of_rows) * len(image)].view(len(errors_of_rows), -1)


@in_one_test("length", [1, 5, 16, 24, 64])
@in_one_test("offset", [0, 7])
def test_rows_are_cut_where_the_blocks_are(length: int, offset: int) -> None:
    """Number by number: the block of each, whether it lies within its row, and its length; and the common parts."""
    generator = torch.Generator().manual_seed(0)
    outputs = 9
    matrix = torch.randn(outputs, PIXELS, generator=generator).double()
    heard = heard_blocks(matrix, offset, length, 5.0)
    if heard is None:
        assert (length, offset) == (64, 7)
        return
    cuts = set()
    for row in range(outputs):
        first = offset + row * PIXELS
        for column in range(PIXELS):
            block = (first + column) // length
            members = [place - first for place in range(block * length, (block + 1) * length)]
            if min(members) >= 0 and max(members) < PIXELS:
                size = float(matrix[row, members].norm())
                assert heard.rows[row, column].item() == pytest.approx(matrix[row, column].item() / size)
            else:
                assert heard.rows[row, column].item() == 0
            cuts |= {column} if (first + column) % length == 0 else set()
    borders = [column for column in range(1, PIXELS) if heard.parts[column] != heard.parts[column - 1]]
    assert borders == sorted(cuts - {0})


def test_the_filter_is_the_textbook_formula() -> None:
    """Against matrices written out: covariance of the prior plus noise of each pixel's own variance."""
    known = prior()
    noise = torch.rand(PIXELS, generator=torch.Generator().manual_seed(0)).double() + 0.01
    covariance = known.basis @ (known.variances - known.rest).diag() @ known.basis.mT + known.rest * torch.eye(PIXELS)
    seen = image_of(5)
    tested = PixelFilter(known, noise)
    solved = torch.linalg.solve(covariance + noise.diag(), seen - known.mean)
    torch.testing.assert_close(tested.image(seen), known.mean + covariance @ solved)
    parts, lengths = torch.arange(PIXELS) // 16, torch.tensor([1.0, 2.0, 0.5, 3.0]).double()
    offset = lengths[parts] * seen - known.mean
    wanted = offset @ torch.linalg.solve(covariance + noise.diag(), offset)
    torch.testing.assert_close(tested.of_parts(seen, parts)(lengths), wanted)


@pytest.mark.parametrize(("length", "offset"), [(16, 0), (12, 0), (16, 5), (24, 0)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_directions_without_noise_are_exact(length: int, offset: int, sign: float) -> None:
    """Up to the sign of all; where D does not divide P, overlapping blocks also tell the parts' lengths."""
    image = sign * image_of(3)
    sizes = torch.randn(40, generator=torch.Generator().manual_seed(1)).double() * (torch.arange(40) % 4 > 0)
    heard = heard_blocks(draws(image, sizes, offset, length, 1e7), offset, length, 1e7)
    assert heard is not None
    search = LengthSearch(heard, prior())
    covered = (heard.blocks > 0).any(dim=0)
    for each in (1.0, -1.0):
        found = search.image(search.settle(each))
        directions = [heard.directions(torch.where(covered, one, 0.0)) for one in (found, image)]
        agreement = (directions[0] * directions[1]).sum() / directions[1].square().sum()
        assert abs(agreement.item()) > 1 - 1e-4


@pytest.mark.parametrize(("length", "kappa"), [(16, 60.0), (12, 60.0), (24, 80.0)])
def test_more_than_a_guess_is_recovered_behind_noise(length: int, kappa: float) -> None:
    """The better of the two signs of 2 images, rows of which a quarter say nothing; the guess is the prior's mean."""
    sizes = torch.randn(96, generator=torch.Generator().manual_seed(1)).double() * (torch.arange(96) % 4 > 0)
    better = 0
    for number in range(2):
        image = image_of(number)
        heard = heard_blocks(draws(image, sizes, 0, length, kappa), 0, length, kappa)
        assert heard is not None
        search = LengthSearch(heard, prior())
        found = [search.image(search.settle(sign)) for sign in (1.0, -1.0)]
        better += min(float((one - image).square().sum()) for one in found) < 0.3 * float(
            (prior().mean - image).square().sum()
        )
    assert better == 2


def units_and_rows(number: int) -> tuple[Units, HeardBlocks]:
    """200 ReLUs, and what is heard of an image in blocks of 8 from those that are on."""
    generator = torch.Generator().manual_seed(2)
    units = Units(*(torch.randn(*size, generator=generator).double() for size in ((200, PIXELS), (200,))))
    image = image_of(number)
    sizes = torch.randn(200, generator=generator).double() * (units.weight @ image + units.bias > 0)
    heard = heard_blocks(draws(image, sizes, 0, 8, 30.0), 0, 8, 30.0)
    assert heard is not None
    return units, heard


def test_units_that_are_on_tell_lengths() -> None:
    """Of 3 images: the mean squared error of the lengths' logarithms is less than half of that by the prior alone."""
    squares = torch.zeros(2)
    for number in range(3):
        image = image_of(number)
        units, heard = units_and_rows(number)
        for which, known in enumerate((units, None)):
            search = LengthSearch(heard, prior(), known)
            found = [search.settle(sign) for sign in (1.0, -1.0)]
            better = max(found, key=lambda one: float(image @ search.image(one)))
            squares[which] += (better.lengths.log() - image.view(-1, 8).norm(dim=1).log()).square().mean()
    assert squares[0] < squares[1] / 2


def test_units_that_are_on_tell_the_sign() -> None:
    """A prior with mean zero finds an image as likely as its negative; the units say which it is, by 20 nats and more.

    All units but those with a large bias are the other way round for the negative.
    """
    image = image_of(4)
    units, heard = units_and_rows(4)
    even = replace(prior(), mean=torch.zeros(PIXELS).double())
    alone, told = (LengthSearch(heard, even, known) for known in (None, units))
    assert alone.settle(1.0).surprise == pytest.approx(alone.settle(-1.0).surprise)
    found = {sign: told.settle(sign) for sign in (1.0, -1.0)}
    right = 1.0 if float(image @ told.image(found[1.0])) > 0 else -1.0
    assert found[right].surprise < found[-right].surprise - 20


def test_deviations_of_units_are_the_textbook_formula() -> None:
    """Of products with an image seen through noise, against the covariance of the normal posterior written out."""
    known = prior()
    generator = torch.Generator().manual_seed(0)
    noise, weight = (torch.rand(*size, generator=generator).double() for size in ((PIXELS,), (5, PIXELS)))
    covariance = known.basis @ (known.variances - known.rest).diag() @ known.basis.mT + known.rest * torch.eye(PIXELS)
    posterior = torch.linalg.inv(torch.linalg.inv(covariance) + (1 / noise).diag())
    wanted = (weight @ posterior @ weight.mT).diagonal().sqrt()
    torch.testing.assert_close(PixelFilter(known, noise).deviations(weight), wanted)


@pytest.mark.parametrize("length", [16, 24])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_sign_and_label_come_from_all_layers(length: int, activation: str) -> None:
    """Through the attack, next to no noise: the whole upload also tells the lengths, so that the image is exact."""
    mechanism = {"name": "vmf", "kappa": 1e7, "blocks": f"size:{length}"}
    heard, truth, labels = observe_digits(mlp(activation, (128,)), 2, mechanism=mechanism)
    found = run_attack(AttackJob("closed_form", heard, mlp(activation, (128,)), CONFIG, 0, public_images=PUBLIC))
    assert [one.labels.tolist() for one in found] == labels.tolist()
    assert float(errors([one.images for one in found], truth).max()) < 1e-3


def test_where_nothing_was_sent_the_mean_is_returned() -> None:
    mechanism = {"name": "vmf", "kappa": 0.0, "blocks": "size:16"}
    heard, _, _ = observe_digits(mlp("relu", (64,)), 1, mechanism=mechanism)
    (found,) = run_attack(AttackJob("closed_form", heard, mlp("relu", (64,)), CONFIG, 0, public_images=PUBLIC))
    mean = prior().mean.view(1, 8, 8) * STD + MEAN
    torch.testing.assert_close(found.images[0], mean.clamp(0, 1).float(), atol=1e-4, rtol=0)


REFUSALS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any], str]] = {
    "a batch": (mlp, 2, {"mechanism": {"name": "vmf", "kappa": 9.0, "blocks": "size:16"}}, "examples 2"),
    "blocks longer than rows": (
        mlp, 1, {"mechanism": {"name": "vmf", "kappa": 9.0, "blocks": "size:100"}}, "row of 64 pixels; given vmf"
    ),
    "no Linear first layer": (
        lenet, 1, {"mechanism": {"name": "vmf", "kappa": 9.0, "blocks": "size:16"}}, "multiplies the image itself"
    ),
}  # fmt: skip


@in_one_test("name", REFUSALS)
def test_a_refusal_is_one_line(name: str) -> None:
    make, count, changes, words = REFUSALS[name]
    images, labels = digits()
    heard = observe(make(), images[:count], labels[:count], **changes)
    result = attack_each(AttackJob("closed_form", [heard], make(), CONFIG, 0))
    assert words in result.failures[0]
    assert "\n" not in result.failures[0]
