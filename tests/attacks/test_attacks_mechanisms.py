"""Uploads through the newer mechanisms: what the adversary is told, keeps, and makes of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attack_victims import digits, errors, example_gradients, mlp, normalise, parameters_of, settings
from safetensors.torch import load, save_file

from fedpriv.attacks.methods.iga import IgaSettings
from fedpriv.attacks.observation import Observation, read_observation, write_observation
from fedpriv.attacks.reconstruction import AttackJob, run_attack
from fedpriv.attacks.reconstruction.upload_model import UploadModel, prepare_victims
from fedpriv.core.errors import InputError
from fedpriv.gradients import DenseGradients
from fedpriv.mechanisms import mechanism_settings
from fedpriv.mechanisms.machinery.redistribution import Redistribution, layer_shares
from tests.cases import in_one_test
from tests.noise import stream

SHAPES = {"a": (3, 2), "b": (4,)}


def uneven(shapes: dict[str, tuple[int, ...]]) -> Redistribution:
    generator = torch.Generator().manual_seed(71)
    raw = {name: (2 * torch.randn(shape, generator=generator)).double().exp() for name, shape in shapes.items()}
    total = sum(float(value.sum()) for value in raw.values())
    return Redistribution({name: value / total for name, value in raw.items()})


@in_one_test(
    "mechanism",
    [
        {"name": "gaussian", "sigma": 0.5, "clip_norm": 0.8, "clipping": "layer"},
        {"name": "laplace", "scale": 0.5, "clip_norm": 0.8},
        {"name": "laplace", "scale": 0.5, "clip_norm": 1e3},
        {"name": "hgm", "sigma": 0.5, "clip_norm": 0.8},
        {"name": "hgm", "sigma": 0.5, "clip_norm": 1e3},
        {"name": "vmf", "kappa": 40.0, "blocks": "size:4"},
    ],
)
@in_one_test("unit", ["example", "update"])
@in_one_test("algorithm", ["fedsgd", "fedavg"])
@in_one_test("size", [1, 3])
def test_expected_uploads(mechanism: dict[str, object], unit: str, algorithm: str, size: int) -> None:
    """Against the mechanism's own expectation, one batch at a time, as the client would have applied it."""
    shares, rate = uneven(SHAPES), 0.4
    built = mechanism_settings({**mechanism, "unit": unit}).mechanism(shares)
    public = settings(
        mechanism={**mechanism, "unit": unit}, algorithm=algorithm, batch_size=size, learning_rate=rate, local_steps=1
    )
    model = UploadModel.of(public, shares)
    generator = torch.Generator().manual_seed(72)
    gradients = {name: torch.randn(5, size, *shape, generator=generator).double() for name, shape in SHAPES.items()}
    expected = model.expected_of_examples(gradients)
    for row in range(5):
        examples = [{name: value[row, k] for name, value in gradients.items()} for k in range(size)]
        if unit == "example":
            released = [built.expected(example) for example in examples]
            sent = {name: torch.stack([one[name] for one in released]).mean(dim=0) for name in gradients}
            upload = sent if algorithm == "fedsgd" else {name: -rate * value for name, value in sent.items()}
        else:
            mean = {name: value[row].mean(dim=0) for name, value in gradients.items()}
            upload = built.expected(mean if algorithm == "fedsgd" else {n: -rate * value for n, value in mean.items()})
        for name, value in model.gradient(upload).items():
            torch.testing.assert_close(expected[name][row], value, rtol=1e-10, atol=1e-12)


def through_hgm(shares: Redistribution, sigma: float, victims: int = 1) -> tuple[list[Observation], torch.Tensor]:
    """FedSGD uploads of single digits through hgm, with the images (victims, 1, 1, 8, 8)."""
    network = mlp(hidden=(32,))
    images, labels = digits()
    config = {"name": "hgm", "sigma": sigma, "clip_norm": 1.0}
    built = mechanism_settings(config).mechanism(shares)
    heard = []
    for client in range(victims):
        one = slice(client, client + 1)
        gradients = DenseGradients(example_gradients(network, normalise(images[one]), labels[one]))
        upload = built.release(gradients, 1, stream(client))
        heard.append(Observation(1, client, parameters_of(network), upload, settings(mechanism=config), shares))
    return heard, images[:victims, None]


def of_the_network(shares: dict[str, float]) -> Redistribution:
    """Shares by tensor, those not named sharing the rest evenly."""
    parameters = parameters_of(mlp(hidden=(32,)))
    rest = 1 - sum(shares.values())
    by_tensor = {name: shares.get(name, rest / (len(parameters) - len(shares))) for name in parameters}
    return Redistribution(
        {name: torch.full_like(value, by_tensor[name] / value.numel()) for name, value in parameters.items()}
    )


def test_an_observation_of_hgm_carries_the_shares(tmp_path: Path) -> None:
    (written, *_), _ = through_hgm(layer_shares(parameters_of(mlp(hidden=(32,)))), 0.1)
    read = read_observation(write_observation(tmp_path, written))
    assert written.redistribution is not None
    assert read.redistribution is not None
    assert list(read.redistribution.shares) and set(read.redistribution.shares) == set(written.parameters)
    for name, value in written.redistribution.shares.items():
        assert torch.equal(read.redistribution.shares[name], value)
    with pytest.raises(ValueError, match="needs the redistribution"):
        replace(written, redistribution=None)


def test_damaged_shares(tmp_path: Path) -> None:
    (written, *_), _ = through_hgm(layer_shares(parameters_of(mlp(hidden=(32,)))), 0.1)
    path = write_observation(tmp_path, written)
    tensors = load(path.read_bytes())
    key = next(name for name in tensors if name.startswith("redistribution/"))
    without = {name: value for name, value in tensors.items() if not name.startswith("redistribution/")}
    cases = {
        "needs the redistribution": without,
        "redistribution and parameters differ": tensors | {key: tensors[key].flatten()[:, None]},
        "not a positive number": tensors | {key: -tensors[key]},
        "not to 1": tensors | {key: 3 * tensors[key]},
    }
    for says, altered in cases.items():
        save_file(altered, path)
        with pytest.raises(InputError, match=says):
            read_observation(path)


@pytest.mark.parametrize(
    "mechanism",
    [
        {"name": "none", "unit": "example", "clip_norm": 1.0, "delta": 1e-5, "blocks": "whole"},
        {"name": "gaussian", "unit": "example", "sigma": 2.0, "clip_norm": 1.0, "delta": 1e-5, "blocks": "whole"},
        {"name": "vmf", "unit": "update", "kappa": 2.0, "clip_norm": 1.0, "delta": 1e-5, "blocks": "layer"},
    ],
)
def test_observations_of_earlier_versions_are_read(mechanism: dict[str, object], tmp_path: Path) -> None:
    """Their settings lack the newer keys."""
    parameters = parameters_of(mlp(hidden=(4,)))
    written = Observation(1, 0, parameters, parameters, settings(mechanism=mechanism))
    read = read_observation(write_observation(tmp_path, written))
    assert read.redistribution is None
    assert UploadModel.of(read.settings).unit == mechanism["unit"]


def test_victims_of_one_run_share_one_model() -> None:
    """Each observation brings its own copy of r; grouped by model, they are still attacked together."""
    shares = layer_shares(parameters_of(mlp(hidden=(32,))))
    heard, _ = through_hgm(shares, 0.1, victims=3)
    copies = [
        replace(one, redistribution=Redistribution({name: value.clone() for name, value in shares.shares.items()}))
        for one in heard
    ]
    victims = prepare_victims(copies, list(heard[0].parameters), torch.device("cpu"))
    assert len({victim.model for victim in victims}) == 1


@pytest.mark.slow
def test_knowing_the_shares_helps_the_adversary() -> None:
    """Noise that drowns the last layer alone: told r, the attack looks away from it; told that r is even, it fails."""
    shares = of_the_network({"output.weight": 0.998, "output.bias": 0.001})
    heard, truth = through_hgm(shares, 0.05, victims=3)
    even = Redistribution({name: torch.full_like(value, 1 / shares.dimension) for name, value in shares.shares.items()})
    attack = IgaSettings(iterations=400, tv=1e-5)
    found = [
        errors([one.images for one in run_attack(AttackJob("iga", told, mlp(hidden=(32,)), attack, 3))], truth)
        for told in (heard, [replace(one, redistribution=even) for one in heard])
    ]
    assert found[0].median() < 0.5 * found[1].median()
