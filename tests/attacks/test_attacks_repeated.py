"""Uploads of the same batch: noise that averages out, mismatches that add up, and batches that are not the same."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attack_victims import digits, errors, lenet, mlp, normalise, observe, settings

from fedpriv.attacks.campaign import attack_each
from fedpriv.attacks.methods.closed_form import ClosedFormSettings
from fedpriv.attacks.methods.dlg import DlgSettings
from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.observation import Observation
from fedpriv.attacks.reconstruction import AttackJob, AttackRefused, Heard, Reconstruction, other_batches, run_attack
from fedpriv.attacks.reconstruction.dummy_gradients.network import Network
from fedpriv.attacks.reconstruction.matching import Matcher, angle, squared_distance
from fedpriv.attacks.reconstruction.upload_model import Victim, join, prepare_victims
from tests.cases import in_one_test

NOISE = {"name": "gaussian", "sigma": 0.02, "clip_norm": 1.0}


def repeated(model: Any, count: int, row: int = 0, *, moving: bool = False, **changes: Any) -> tuple[Observation, ...]:
    """Uploads of one digit in so many rounds, each with noise of its own; the model moves between them, or does not."""
    images, labels = digits()
    heard = []
    for number in range(count):
        with torch.no_grad():
            for value in model.parameters():
                if moving and number:
                    generator = torch.Generator().manual_seed(number)
                    value.add_(0.02 * torch.randn(value.shape, generator=generator))
        seed = 7919 * row + number
        heard.append(
            observe(
                model,
                images[[row]],
                labels[[row]],
                client=row,
                round_number=1 + number,
                noise_seed=seed,
                client_examples=1,
                **{"mechanism": NOISE, **changes},
            )
        )
    return tuple(heard)


def joined(model: Any, heard: tuple[Observation, ...]) -> Victim:
    network = Network(model)
    return join(prepare_victims(heard, network.names, network.device))


@in_one_test("count", [2, 9])
@in_one_test(
    "mechanism",
    [
        {"name": "gaussian", "sigma": 3.0, "clip_norm": 0.5},
        {"name": "laplace", "scale": 0.5, "clip_norm": 1.0},
        {"name": "vmf", "kappa": 5.0},
    ],
)
def test_the_variance_of_the_noise_falls_with_their_number(count: int, mechanism: dict[str, Any]) -> None:
    """Against the sample variance of single uploads. Of 4,810 coordinates a variance has a standard error of 3 % at
    most (Laplace), so that a ratio is off by 20 % in less than 1 of 10^5 such tests.
    """
    model = mlp()
    single = joined(model, repeated(model, 1, mechanism=mechanism))
    together = joined(model, repeated(model, count, mechanism=mechanism))
    one, mean = (torch.cat([v.flatten() for v in victim.gradient.values()]).double() for victim in (single, together))
    assert together.more == ()
    assert together.model.releases == count * single.model.releases
    # The signal is far below the noise: sigma 1.5 against a norm of 0.5, and of a unit vector against 0.1 of it.
    assert float(mean.square().mean() / one.square().mean()) == pytest.approx(1 / count, rel=0.2)


@in_one_test("objective", [squared_distance, angle])
@in_one_test("mechanism", [{"name": "none"}, NOISE, {"name": "vmf", "kappa": 50.0, "blocks": "layer"}])
def test_uploads_from_other_parameters_add_up(objective: Any, mechanism: dict[str, Any]) -> None:
    """The oracle: a matcher of each upload alone, added. Rows of other victims keep theirs, in any order."""
    model = mlp("tanh").double()
    network = Network(model)
    heard = repeated(model, 3, moving=True, mechanism=mechanism)
    parts = prepare_victims(heard, network.names, network.device)
    other = parts[1]
    together = join(parts)
    assert len(together.uploads) == 3
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 1, 1, 8, 8, generator=generator).double()
    labels = torch.randn(4, 1, 10, generator=generator).double().softmax(dim=2)
    rows = [other, together, together, parts[2]]
    found = Matcher(network, rows, objective)(images, labels)

    def alone(victim: Victim, row: int) -> torch.Tensor:
        return Matcher(network, [victim], objective)(images[[row]], labels[[row]])[0]

    summed = [torch.stack([alone(part, row) for part in parts]).sum() for row in (1, 2)]
    torch.testing.assert_close(found, torch.stack([alone(other, 0), *summed, alone(parts[2], 3)]))
    chosen = Matcher(network, rows, objective).select(torch.tensor([2, 3]))
    torch.testing.assert_close(chosen(images[2:], labels[2:]), found[2:])


def test_the_squared_distance_of_several_is_that_of_plain_autograd() -> None:
    model = mlp("tanh").double()
    images, labels = digits()
    heard = repeated(model, 3, moving=True, mechanism={"name": "none"})
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(3)).double()
    total = 0.0
    for one in heard:
        torch.nn.utils.vector_to_parameters(
            torch.cat([v.flatten() for v in one.parameters.values()]), model.parameters()
        )
        gradients = torch.autograd.grad(F.cross_entropy(model(x), torch.tensor([4])), list(model.parameters()))
        total += sum(float((a - b).square().sum()) for a, b in zip(gradients, one.upload.values(), strict=True))
    label = F.one_hot(torch.tensor([[4]]), 10).double()
    found = Matcher(Network(model), [joined(model, heard)], squared_distance)(x[None], label).detach()
    assert float(found) == pytest.approx(total, rel=1e-9)
    assert float((normalise(images[0]) - x).abs().max()) > 0.1
    assert int(labels[0]) == 0


CONFIGS = {
    "closed_form": ClosedFormSettings(),
    "iga": IgaSettings(iterations=200, tv=1e-3),
    "dlg": DlgSettings(iterations=30, restarts=1),
}


@pytest.mark.parametrize(
    ("name", "moving"),
    [
        ("closed_form", False),
        ("closed_form", True),
        pytest.param("iga", True, marks=pytest.mark.slow),
    ],
)
def test_images_get_clearer(name: str, moving: bool) -> None:
    """8 uploads against one, of 6 digits: at least 5 get better (by chance in 1 of 9 such tests), and the median PSNR
    rises by 2 dB.
    """
    images, labels = digits()
    model = mlp("tanh")
    uploads = [repeated(mlp("tanh"), 8, row, moving=moving) for row in range(6)]

    def run(given: Sequence[Heard]) -> list[Reconstruction]:
        return run_attack(AttackJob(name, given, model, CONFIGS[name], 0, public_images=images[800:]))

    single, several = run([heard[0] for heard in uploads]), run(uploads)
    one, other = (errors([result.images for result in found], images[:6, None]) for found in (single, several))
    assert int((one > other).sum()) >= 5
    assert float(one.median() / other.median()) > 10**0.2
    assert [int(result.labels) for result in several] == labels[:6].tolist()
    assert all("8 uploads of the same examples were attacked together" in result.note for result in several)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_victim_of_several_uploads_stands_beside_others(name: str) -> None:
    """In one batch it gives what it gives alone."""
    model = mlp("tanh").double()
    first, second = repeated(model, 3, 0), repeated(model, 3, 1, moving=True)
    config = CONFIGS[name]
    if name != "closed_form":
        config = config.model_copy(update={"iterations": 5})
    together = run_attack(AttackJob(name, [first, second[0], second], model, config, 0))
    for given, one in zip([first, second[0], second], together, strict=True):
        (alone,) = run_attack(AttackJob(name, [given], model, config, 0))
        torch.testing.assert_close(one.images, alone.images, atol=1e-5, rtol=0)
    assert [one.client for one in together] == [0, 1, 1]


def test_a_broken_one_among_them_is_named() -> None:
    model = mlp()
    heard = repeated(model, 3)
    broken = replace(heard[1], upload={**heard[1].upload, "output.bias": torch.full((10,), torch.nan)})
    result = attack_each(AttackJob("iga", [(heard[0], broken), heard[2]], model, IgaSettings(iterations=2), 0))
    assert set(result.found) == {1}
    assert "NaN or infinity among its upload" in result.failures[0]


def test_whole_batches_are_known_to_be_the_same() -> None:
    model = lenet()
    assert other_batches(repeated(model, 3)) is None
    images, labels = digits()
    steps = {"algorithm": "fedavg", "local_steps": 4, "client_examples": 8}
    assert other_batches([observe(model, images[:2], labels[:2], round_number=k, **steps) for k in (1, 2)]) is None


@in_one_test(
    ("changes", "words"),
    [
        ({"settings": settings(batch_size=1, client_examples=64)}, "uses 1 of its 64 examples in a round"),
        ({"settings": settings(batch_size=None, client_examples=1)}, "the batch size is withheld"),
        ({"settings": settings(clients=3, client_examples=1)}, "in a sum"),
    ],
)
def test_other_batches_are_told(changes: dict[str, Any], words: str) -> None:
    model = mlp()
    heard = [replace(one, **changes) for one in repeated(model, 2, mechanism={"name": "none"})]
    reason = other_batches(heard)
    assert reason is not None
    assert words in reason
    assert "\n" not in reason


def test_what_is_not_of_one_batch_is_refused() -> None:
    model = mlp()
    here, there = repeated(model, 2, 0), repeated(model, 2, 1)
    assert "not of the same client" in str(other_batches([here[0], there[0]]))
    with pytest.raises(AttackRefused, match="clients 0 and 1 are not of one batch"):
        joined(model, (here[0], there[0]))
    other = replace(here[1], settings=replace(here[1].settings, mechanism={"name": "none"}))
    with pytest.raises(AttackRefused, match="were computed in different ways"):
        joined(model, (here[0], other))
    with pytest.raises(AttackRefused, match="other labels are known"):
        joined(model, (replace(here[0], labels=(3,)), replace(here[1], labels=(4,))))
