"""What `fedpriv model` says of a network agrees with autograd, with arithmetic, and with the network's own code."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fedpriv.core.federated import example_losses
from fedpriv.diagnosis import diagnose as comparing
from fedpriv.diagnosis import diagnose as flow
from fedpriv.diagnosis.cost import step_cost
from fedpriv.diagnosis.diagnose import Diagnosis
from fedpriv.gradients import DenseGradients
from fedpriv.mechanisms.gaussian import GaussianMechanism
from tests.command_line import fedpriv

NETWORKS = '''
from torch import nn
import torch

class Scaled(nn.Module):
    """Holds a parameter whose use has no rule."""
    def __init__(self, width):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(width, 1, 1)), nn.Conv2d(width, width, 1)
    def forward(self, x):
        return torch.einsum("bchw,cde->bchw", self.inner(x), self.scale)

def blocks(shape, classes, norm=nn.Identity):
    layers = [nn.Conv2d(shape[0], 4, 3, 2), norm(4)]
    layers += [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh(), Scaled(4)) for _ in range(3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))

def mixing(shape, classes):
    return blocks(shape, classes, nn.BatchNorm2d)

class Gated(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4))
        self.inner, self.output = nn.Linear(48, 4), nn.Linear(4, classes)
    def forward(self, x):
        return self.output(self.gate * torch.tanh(self.inner(x[:, :, :4, :4].flatten(1))))

def small(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(48, classes))
'''


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "diagnosed.py").write_text(NETWORKS)
    return tmp_path


def told(name: str, here: Path, *more: str) -> Diagnosis:
    done = fedpriv("model", name, "--json", "--set", "adversary.attacks=[iga, closed_form]", *more, cwd=here)
    assert done.returncode == 0, done.stderr
    return Diagnosis.model_validate_json(done.stdout)


def test_a_network_of_ones_own_is_told_layer_by_layer(here: Path) -> None:
    found = told("diagnosed:blocks", here, "--batch", "4")
    assert found.acceptance.accepted and found.trained == 3 * 4 * 9 + 4 + 3 * (4 * 4 * 9 + 4 + 4 + 4 * 4 + 4) + 50
    layers = {(layer.name, layer.kind): layer for layer in found.layers}
    assert layers["{2-4}.0", "Conv2d"].count == 3 and layers["{2-4}.0", "Conv2d"].way == "ghost"
    scaled = layers["{2-4}.2", "Scaled"]
    assert (scaled.count, scaled.parameters, scaled.way) == (3, 3 * (4 + 4 * 4 + 4), "dense")
    assert "einsum has no rule" in scaled.reason
    assert found.exactness is not None and found.exactness.error < 1e-12 and found.exactness.precision == "float64"
    assert found.cost is not None and found.cost.batch == 4 and min(found.cost.sgd_ms, found.cost.private_ms) > 0
    assert [(trial.name, trial.runs) for trial in found.attacks] == [("iga", True), ("closed_form", False)]
    assert "Linear behind flattening" in found.attacks[1].reason


def test_a_network_that_holds_a_parameter_itself_is_a_layer_among_others(here: Path) -> None:
    found = told("diagnosed:Gated", here)
    layers = {layer.name: (layer.parameters, layer.way) for layer in found.layers}
    assert layers == {"(the network)": (4, "ghost"), "(inner, output)": (246, "ghost")}
    assert found.way == "" and found.exactness is not None and found.exactness.error < 1e-12


def test_what_mixes_examples_is_named_with_what_to_write_instead(here: Path) -> None:
    done = fedpriv("model", "diagnosed:mixing", "-q", "--set", "adversary.attacks=[]", cwd=here, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "accepted with mechanism.name = 'gaussian': no" in said and 'write model.norm = "group"' in said
    assert "mixing 1 (BatchNorm2d)" in said
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_an_experiment_file_is_taken_with_its_own_data(here: Path) -> None:
    text = '[model]\nname = "logistic"\n[adversary]\nattacks = []\n[mechanism]\nname = "vmf"\nepsilon = 600\n'
    (here / "own.toml").write_text(text)
    found = told("own.toml", here, "--set", "adversary.attacks=[]")
    assert (found.model, found.shape, found.classes, found.trained) == ("logistic", (1, 8, 8), 10, 650)
    assert found.cost is not None and not found.unmeasured, "a nominal epsilon is no obstacle: any noise costs the same"


def test_the_first_shape_that_a_network_takes_is_taken(here: Path) -> None:
    experiment, dataset = flow.fitting("encoder", ["model.width=8"], None, 4, 2)
    assert (dataset.shape, dataset.kind, experiment.model.name) == ((1, 1, 16), "sentence", "encoder")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "model.name = 'nothing'"),
        (("diagnosed:nothing",), "module diagnosed has no 'nothing'"),
        (("diagnosed:blocks", "--shape", "3,x"), "--shape 3,x: C,H,W such as 3,32,32, or tokens such as 16"),
        (("diagnosed:small", "--shape", "3,5,5"), "cannot take images of shape (2, 3, 5, 5)"),
        (("missing.toml",), "missing.toml: no such file"),
        (("missing.toml", "--classes", "3"), "--shape and --classes are those of the data in missing.toml"),
        (("lenet", "--set", "mechanism.nothing=1"), "mechanism.nothing"),
    ],
)
def test_bad_input_is_one_line(here: Path, arguments: tuple[str, ...], words: str) -> None:
    done = fedpriv("model", *arguments, cwd=here)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert words in done.stderr


@pytest.mark.parametrize("head", ["random", "zeros"])
@pytest.mark.parametrize("off", ["0.weight", "0.bias", "2.weight"])
def test_a_wrong_gradient_shows_as_large_as_it_is(off: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a head of zeros, too, where the other gradients are zero at first."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3), torch.arange(5) % 2
    if head == "zeros":
        nn.init.zeros_(model[2].weight)
    assert comparing.exactness(model, example_losses, x, y).error < 1e-14
    right = comparing.per_example_gradients

    def wrong(*given: object, **named: object) -> DenseGradients:
        rows = right(*given, **named).rows(0, 5)  # type: ignore[arg-type]
        return DenseGradients({name: value * (1 + 1e-6 * (name == off)) for name, value in rows.items()})

    monkeypatch.setattr(comparing, "per_example_gradients", wrong)
    found = comparing.exactness(model, example_losses, x, y)
    assert 1e-7 < found.error < 5e-6 and found.layer.startswith(off.partition(".")[0])
    assert found.rounding is not None and found.rounding < 1e-13


def test_rounding_alone_is_no_gradient() -> None:
    """A bias of keys moves every score by the same, so that its gradient is rounding only."""
    torch.manual_seed(0)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
            self.output = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = torch.softmax(self.query(x) @ self.key(x).mT, -1)
            return self.output(scores @ self.value(x)).mean(1)

    found = comparing.exactness(Attention(), example_losses, torch.randn(6, 5, 4), torch.arange(6) % 2)
    assert found.error < 1e-12


@pytest.mark.parametrize(("factor", "least", "most"), [(1.0, 1e-17, 1e-14), (1e9, 1e-9, 1e-3)])
def test_rounding_counts_as_much_as_the_network_makes_of_it(
    factor: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phase that is large loses as many digits as it has before the point."""
    monkeypatch.setattr(comparing, "TINY", -1.0)
    torch.manual_seed(0)

    class Waves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.output = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.output(torch.sin(factor * self.inner(x)) / factor)

    found = comparing.exactness(Waves(), example_losses, torch.randn(6, 8), torch.arange(6) % 2)
    assert found.rounding is not None and least < found.rounding < most


def test_memory_counts_what_is_written_out() -> None:
    """A network that holds its weight itself has B gradients of K numbers; SGD has one."""

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(10, 1 << 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumsum(x @ self.weight.mT, 1)

    x, y = torch.randn(8, 1 << 16), torch.arange(8) % 10
    found = step_cost(Held(), example_losses, x, y, GaussianMechanism(1.0, 1.0))
    assert found.sgd_mib is not None and found.private_mib is not None
    assert 6 < found.sgd_mib < 16 and found.private_mib > found.sgd_mib + 7 * 2.5


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["layer1.0.conv1", "layer1.0.conv2", "layer4.1.conv2"], "layer{1-4}.{0-1}.conv{1-2}"),
        (["h.0.attn.q_proj", "h.0.attn.k_proj", "h.7.attn.q_proj"], "h.{0-7}.attn.(q_proj, k_proj)"),
        (["fc"], "fc"),
        (["a.1", "a.3"], "a.{1-3}"),
    ],
)
def test_names_that_differ_in_numbers_are_folded(names: list[str], folded: str) -> None:
    assert flow._with_ranges(names) == folded


def test_json_is_all_that_is_printed(here: Path) -> None:
    done = fedpriv("model", "lenet", "--json", "--set", "adversary.attacks=[]", cwd=here)
    assert json.loads(done.stdout)["trained"] == 15826 and done.stderr == ""
