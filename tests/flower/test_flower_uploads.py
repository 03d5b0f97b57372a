"""What replies reveal without the network: inputs in closed form, labels, counts, trees; against what was put in."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

from fedpriv.core.progress import Silent
from fedpriv.flower import tap
from fedpriv.flower.attack import TappedSummary, attack_tapped
from fedpriv.flower.uploads import first_inputs
from tests.flower.apps import context, question

DIGITS = load_digits()
Arrays = list[np.ndarray]


def steps(images: np.ndarray, labels: np.ndarray, rate: float, hidden: int = 32) -> tuple[Arrays, Arrays]:
    """A network of two dense layers before and after one step of SGD, in float32, weights as (in, out)."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(images.shape[1], hidden), torch.nn.Linear(hidden, 10)]
    tensors = [value for layer in layers for value in (layer.weight, layer.bias)]
    before = [value.detach().numpy().T.copy() for value in tensors]
    output = layers[1](torch.relu(layers[0](torch.tensor(images, dtype=torch.float32))))
    torch.nn.functional.cross_entropy(output, torch.tensor(labels)).backward()
    after = [(value - rate * value.grad).detach().numpy().T.copy() for value in tensors]
    return before, after


def keras(arrays: Arrays) -> dict[str, np.ndarray]:
    return {str(place): value for place, value in enumerate(arrays)}


def flax(arrays: Arrays) -> dict[str, np.ndarray]:
    """Leaves of a tree, by name: the bias comes first."""
    names = ["Dense_0/kernel", "Dense_0/bias", "Dense_1/kernel", "Dense_1/bias"]
    return dict(sorted(zip(names, arrays, strict=True)))


def pytorch(arrays: Arrays) -> dict[str, np.ndarray]:
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    return {name: value.T for name, value in zip(names, arrays, strict=True)}


def scikit_learn(arrays: Arrays) -> dict[str, np.ndarray]:
    """All weights, then all biases."""
    return keras([arrays[0], arrays[2], arrays[1], arrays[3]])


def change(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(after[name].astype(float) - before[name]).float() for name in before}


@pytest.mark.parametrize("layout", [keras, flax, pytorch, scikit_learn])
@pytest.mark.parametrize("rate", [1e-3, 0.1])
def test_a_single_example_is_the_ratio_whatever_the_layout(
    layout: Callable[[Arrays], dict[str, np.ndarray]], rate: float
) -> None:
    for row in range(20):
        image = DIGITS.data[row : row + 1] / 16
        found = first_inputs(change(*map(layout, steps(image, DIGITS.target[row : row + 1], rate))))
        assert found is not None and found.shape == (1, 64)
        assert np.abs(found[0].numpy() - image[0]).max() < 0.02


def test_of_a_batch_only_what_two_neurons_agree_on_is_named() -> None:
    """Each input that is named is one of the batch: with hidden neurons that one example alone activates."""
    images = np.eye(64)[:6] + DIGITS.data[:6] / 160
    before, after = steps(images, DIGITS.target[:6], 0.1, hidden=400)
    found = first_inputs(change(keras(before), keras(after)))
    assert found is not None
    for row in found.numpy():
        assert np.abs(images - row).max(axis=1).min() < 0.02
    mixed = np.random.default_rng(0).normal(size=(40, 64))
    dense = change(*map(keras, steps(mixed, np.arange(40) % 10, 0.1, hidden=16)))
    assert first_inputs(dense) is None
    signs = {name: value.sign() * 1e-3 for name, value in dense.items()}
    assert first_inputs(signs) is None


def test_neurons_that_agree_on_no_example_name_none() -> None:
    """Of two classes the errors are opposite on any batch; under Adam neurons of one batch have its signs alone."""
    stream = np.random.default_rng(0)
    rows, errors = stream.normal(size=(32, 20)), stream.normal(size=32)
    both = torch.tensor(np.stack([errors @ rows, -errors @ rows])).float()
    assert first_inputs({"weight": both, "bias": torch.tensor([errors.sum(), -errors.sum()]).float()}) is None
    weight, bias = torch.tensor(stream.normal(size=(8, 20))).float(), torch.tensor(stream.normal(size=8)).float()
    signs = {"weight": weight.clone(), "bias": bias.clone()}
    for neuron in (2, 5):
        signs["weight"][neuron] = 0.7e-1 * torch.tensor(rows[0]).sign() * (-1) ** neuron
        signs["bias"][neuron] = 0.7e-1 * (-1) ** neuron
    assert first_inputs(signs) is None


def answered(
    home: Path, monkeypatch: pytest.MonkeyPatch, content: RecordDict, sent: ArrayRecord | None
) -> TappedSummary:
    """Have a client answer with these records, and attack what the tap wrote."""
    monkeypatch.setenv("FEDPRIV_RUNS", str(home / "runs"))
    app = ClientApp(mods=[tap(home / __name__)])

    @app.train()
    def train(message: Message, _: Any) -> Message:
        return Message(content, reply_to=message)

    message = question({})
    if sent is None:
        del message.content["arrays"]
    else:
        message.content["arrays"] = sent
    app(message, context())
    return attack_tapped(home / "runs" / "tap-1", [], [], [], Silent())


def test_a_scikit_learn_mlp_gives_its_digits_away_without_any_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own partial_fit, of one digit a message, with momentum and weight decay."""
    (tmp_path / "app").mkdir()
    for row in range(5):
        home = tmp_path / str(row)
        home.mkdir()
        model = MLPClassifier((32,), solver="sgd", learning_rate_init=0.01, random_state=row)
        model.partial_fit(DIGITS.data[100:110] / 16, DIGITS.target[100:110], classes=np.arange(10))
        start = [value.copy() for value in (*model.coefs_, *model.intercepts_)]
        model._optimizer.velocities = [np.zeros_like(value) for value in start]
        image, label = DIGITS.data[row : row + 1] / 16, DIGITS.target[row : row + 1]
        model.partial_fit(image, label)
        content = RecordDict({"arrays": ArrayRecord([*model.coefs_, *model.intercepts_])})
        content["metrics"] = MetricRecord({"num-examples": 1, "loss": 0.5})
        summary = answered(home, monkeypatch, content, ArrayRecord(start))
        said = " ".join(summary.verdict)
        assert "closed form: one example of 64 numbers" in said and "num-examples = 1: all of it is about one" in said
        assert f"rose for [{label[0]}]" in said and "Proven: nothing" not in said
        found = load_file(home / "runs" / "tap-1" / "reconstructions" / "0001-0003-inputs.safetensors")["inputs"]
        assert np.abs(found[0].numpy() - image[0]).max() < 0.02


@pytest.mark.parametrize(("optimizer", "examples"), [("SGD", 2), ("Adam", 1)])
def test_a_ratio_that_may_be_no_input_is_not_called_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str, examples: int
) -> None:
    """Neurons agree on the mean of two digits of one regression; of ten steps of Adam on the signs of a digit."""
    torch.manual_seed(0)
    images = torch.tensor(DIGITS.data[:examples] / 16).float()
    network = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    network[0].weight.data *= 1e-3  # tanh is linear there: the errors of both are proportional
    start = ArrayRecord(network.state_dict())
    steps_of = getattr(torch.optim, optimizer)(network.parameters(), 1e-3)
    for _ in range(10):
        steps_of.zero_grad()
        (network(images) - torch.tensor([[3.0], [8.0]])[:examples]).square().mean().backward()
        steps_of.step()
    content = RecordDict({"arrays": ArrayRecord(network.state_dict())})
    content["metrics"] = MetricRecord({"num-examples": examples})
    said = " ".join(answered(tmp_path, monkeypatch, content, start).verdict)
    found = load_file(tmp_path / "runs" / "tap-1" / "reconstructions" / "0001-0003-inputs.safetensors")["inputs"]
    assert float((torch.cdist(found, images) / images.norm(dim=1)).min()) > 0.05
    assert "closed form" not in said
    assert ("0, 1 or -1" if optimizer == "Adam" else "or a mean of those of several") in said


def test_behind_convolutions_a_dense_layer_is_found_and_reads_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of arrays, as Keras and older Flower apps send: each weight is followed by its bias."""
    torch.manual_seed(0)
    features, errors = torch.rand(36), torch.tensor([0.5, -0.2, -0.3])
    moves = [torch.rand(3, 3, 1, 4), torch.rand(4), torch.outer(features, errors), errors]
    start = [torch.rand_like(move) for move in moves]
    content = RecordDict({"arrays": ArrayRecord([(a + 0.1 * b).numpy() for a, b in zip(start, moves, strict=True)])})
    content["metrics"] = MetricRecord({"num-examples": 1})
    said = " ".join(answered(tmp_path, monkeypatch, content, ArrayRecord([value.numpy() for value in start])).verdict)
    assert "in closed form: 36 numbers, features of one example" in said and "rose for [0]" in said
    assert "rows moved" not in said


def tree(thresholds: list[float]) -> bytes:
    """As XGBoost writes a tree: nodes without children hold a leaf's value in the place of a threshold."""
    nodes = len(thresholds)
    told = {
        "split_conditions": [*thresholds, *[0.3] * (nodes + 1)],
        "left_children": [*range(1, nodes + 1), *[-1] * (nodes + 1)],
        "sum_hessian": [float(nodes + 1), *[3.0] * (nodes - 1), *[2.0] * nodes, 1.0],
    }
    return json.dumps({"learner": {"gradient_booster": {"model": {"trees": [told]}}}}).encode()


def grown(counts: list[float]) -> bytes:
    """XGBoost's tree: column 1 below 0 or not, then column 0 below 0 or not, and how many records fell where."""
    told = {
        "left_children": [1, 3, 5, -1, -1, -1, -1],
        "right_children": [2, 4, 6, -1, -1, -1, -1],
        "split_indices": [1, 0, 0, 0, 0, 0, 0],
        "split_conditions": [0.0] * 7,
        "sum_hessian": [sum(counts), *[1.0] * 2, *counts],
    }
    return json.dumps({"learner": {"trees": [told]}}).encode()


def twin(counts: list[float]) -> bytes:
    """The same as CatBoost writes it: the first split is the last bit."""
    splits = [{"border": 0.0, "float_feature_index": place} for place in (0, 1)]
    return json.dumps({"oblivious_trees": [{"splits": splits, "leaf_weights": counts}]}).encode()


def alike(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Of members the first column has the sign of the second; of others it has either."""
    stream = np.random.default_rng(client)
    signs, others = (stream.choice([-1.0, 1.0], size=(number, 2)) for number in (20, 40))
    signs[:, 0] = signs[:, 1]
    return tuple(values * 5 + stream.normal(size=values.shape) / 10 for values in (signs, others))  # type: ignore[return-value]


@pytest.mark.parametrize("write", [grown, twin])
@pytest.mark.parametrize("tells", [True, False])
def test_the_weights_of_leaves_tell_an_unknown_value(
    write: Callable[[list[float]], bytes], tells: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where records that are below in one column are below in the other, either value follows from the other one."""
    (tmp_path / "fedpriv.toml").write_text(f'[tap]\nrecords = "{__name__}:alike"\n')
    content = RecordDict({"model": ConfigRecord({"tree": write([10.0, 0.0, 0.0, 10.0] if tells else [5.0] * 4)})})
    said = " ".join(answered(tmp_path, monkeypatch, content, None).verdict)
    found = re.search(r"its trees split, by the weights of leaves: guess .* off by (.*)% of .* measured (.*)% ", said)
    assert found is not None
    guess, measured = map(float, found.groups())
    assert measured < 5 < 30 < guess if tells else abs(measured - guess) < 5


def words() -> tuple[RecordDict, ArrayRecord, str]:
    after = np.zeros((50, 4), np.float32)
    after[[3, 17]] = 0.5
    return (
        RecordDict({"arrays": ArrayRecord([after])}),
        ArrayRecord([np.zeros((50, 4), np.float32)]),
        "2 of 50 rows moved",
    )


def signs() -> tuple[RecordDict, ArrayRecord, str]:
    step = np.sign(np.random.default_rng(0).normal(size=(30, 4))).astype(np.float32) * np.float32(1e-3)
    return RecordDict({"arrays": ArrayRecord([step])}), ArrayRecord([step * 0]), "as the first step of Adam or signs do"


def few() -> tuple[RecordDict, ArrayRecord, str]:
    step = np.round(np.random.default_rng(0).normal(size=(100, 100)), 1).astype(np.float32)
    return RecordDict({"arrays": ArrayRecord([step])}), ArrayRecord([step * 0]), "values only: it was quantised"


def sparse() -> tuple[RecordDict, ArrayRecord, str]:
    step = np.zeros(1000, np.float32)
    step[:10] = np.arange(1, 11)
    return RecordDict({"arrays": ArrayRecord([step])}), ArrayRecord([step * 0]), "99.0% of it is zero"


def one_number() -> tuple[RecordDict, ArrayRecord, str]:
    """scikit-learn's MLPClassifier of two classes: the only bias of several numbers is that of the hidden layer."""
    step = [np.random.default_rng(0).normal(size=size).astype(np.float32) for size in ((30, 8), (8, 1), (8,), (1,))]
    return RecordDict({"arrays": ArrayRecord(step)}), ArrayRecord([each * 0 for each in step]), "of 257 numbers has"


def still() -> tuple[RecordDict, ArrayRecord, str]:
    return RecordDict({"arrays": ArrayRecord([np.ones(4)])}), ArrayRecord([np.ones(4)]), "nothing moved"


def diverged() -> tuple[RecordDict, ArrayRecord, str]:
    step = [np.full(size, np.nan, np.float32) for size in ((8, 30), (8,))]
    sent = ArrayRecord([np.ones_like(each) for each in step])
    return RecordDict({"arrays": ArrayRecord(step)}), sent, "its update is not finite"


def boosted() -> tuple[RecordDict, ArrayRecord | None, str]:
    data = np.frombuffer(tree([1.5, 7.25]), np.uint8)
    said = "trees with 2 thresholds, 2 of them distinct; each is a value of the client's data"
    return RecordDict({"arrays": ArrayRecord([data])}), ArrayRecord([np.frombuffer(b"", np.uint8)]), said


def passed_on() -> tuple[RecordDict, ArrayRecord | None, str]:
    """Cyclic boosting: the trees that came are sent back with one more."""
    told = [json.loads(tree(own)) for own in ([1.5, 7.25], [4.0])]
    came, left = (np.frombuffer(json.dumps({"trees": each}).encode(), np.uint8) for each in (told[:1], told))
    said = "trees with 1 thresholds, 1 of them distinct; each is a value of the client's data or lies between two: 4."
    return RecordDict({"arrays": ArrayRecord([left])}), ArrayRecord([came]), said


def only_received() -> tuple[RecordDict, ArrayRecord | None, str]:
    data = np.frombuffer(tree([1.5, 7.25]), np.uint8)
    return RecordDict({"metrics": MetricRecord({"auc": 0.9})}), ArrayRecord([data]), "leaves: metrics (auc = 0.9)."


def in_a_config() -> tuple[RecordDict, ArrayRecord | None, str]:
    return RecordDict({"model": ConfigRecord({"tree": tree([4.5])})}), None, "smallest leaf has the weight 1"


def oblivious() -> tuple[RecordDict, ArrayRecord | None, str]:
    """As CatBoost 1.2.10 writes trees."""
    splits = [{"border": border, "float_feature_index": 0, "split_type": "FloatFeature"} for border in (-0.5, 2.25)]
    told = json.dumps({"oblivious_trees": [{"splits": splits, "leaf_values": [0.1, 0.2, 0.3, 0.4]}]}).encode()
    return RecordDict({"model": ConfigRecord({"tree": told})}), None, "trees with 2 thresholds, 2 of them distinct"


def pickled() -> tuple[RecordDict, ArrayRecord | None, str]:
    return RecordDict({"model": ConfigRecord({"tree": b"\x80\x04K\x01."})}), None, "of a pickle, which is not opened"


def times() -> tuple[RecordDict, ArrayRecord | None, str]:
    return RecordDict({"survival": ArrayRecord([np.array([13.5, 7.0])])}), None, "leaves as it is: 13.5, 7"


def counted() -> tuple[RecordDict, ArrayRecord | None, str]:
    said = (
        "as it is, whole numbers that add up to 9, as counts do; 2 of 4 are 1, which is about one example: 1, 0, 7, 1"
    )
    return RecordDict({"histogram": ArrayRecord([np.array([1, 0, 7, 1])])}), None, said


def echoed() -> tuple[RecordDict, ArrayRecord | None, str]:
    """As evaluations in Flower's quickstart for Hugging Face are."""
    sent = ArrayRecord([np.full(3, 5), np.full(2, 7)])
    return RecordDict({"arrays": sent}), sent, "sent back unchanged: arrays/0, arrays/1."


def many() -> tuple[RecordDict, ArrayRecord | None, str]:
    content = RecordDict({name: ArrayRecord([np.full(2, 0.5)] * 5) for name in ("a", "b")})
    return (
        content,
        None,
        "b/0 leaves as it is: all 2 numbers are 0.5. "
        + ("train of round 1, client 3: 4 further arrays of what is no update: b/1, b/2, b/3, b/4."),
    )


@pytest.mark.parametrize(
    "case",
    [
        words,
        signs,
        few,
        sparse,
        one_number,
        still,
        diverged,
        boosted,
        passed_on,
        only_received,
        oblivious,
        in_a_config,
        pickled,
        times,
        counted,
        echoed,
        many,
    ],
)
def test_what_a_reply_is_made_of_is_said(
    case: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, sent, said = case()
    found = " ".join(answered(tmp_path, monkeypatch, content, sent).verdict)
    assert said in found and "labels of the client, if" not in found
    assert ("thresholds" in found) is ("thresholds" in said or "leaf" in said)
