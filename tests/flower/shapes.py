"""Small Flower apps of every shape that people have, each in its framework: what leaves is what is looked at.

Data are random or scikit-learn's digits, networks tiny. ``python -m tests.flower.shapes [NAME ...]`` runs each with the
tap and with privatise, and prints what is said; frameworks that are not installed are named.
"""

import importlib
import importlib.util
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as OldFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fedpriv.core.errors import InputError
from fedpriv.core.progress import Silent
from fedpriv.engines.inline import run_server
from fedpriv.flower import privatise, tap
from fedpriv.flower.attack import TappedSummary, attack_tapped
from studies.noise_in_sum import OneProcess

CLIENTS, EXAMPLES = 3, 4  # examples of a client, one batch
Mods = Sequence[Any]
Apps = tuple[ClientApp, ServerApp]


@dataclass(frozen=True)
class Shape:
    """One kind of app."""

    build: Callable[[Mods], Apps]
    says: str  # a part of what is said of what leaves
    protected: str = ""  # of what is said with privatise; empty: the ledger's sentence
    needs: tuple[str, ...] = ()  # packages that the project does not depend on
    model: str = ""  # tap.model; empty: it is not set
    settings: str = ""  # further lines of fedpriv.toml's [tap]
    privatise: str = ""  # and of [privatise]
    tap_last: bool = False  # whether the tap comes after the app's own mods


SHAPES: dict[str, Shape] = {}


def shape(
    name: str, says: str, protected: str = "", **keys: Any
) -> Callable[[Callable[[Mods], Apps]], Callable[[Mods], Apps]]:
    def entered(build: Callable[[Mods], Apps]) -> Callable[[Mods], Apps]:
        SHAPES[name] = Shape(build, says, protected, **keys)
        return build

    return entered


def missing(name: str) -> list[str]:
    """Frameworks of a shape that are not installed."""
    return [package for package in SHAPES[name].needs if importlib.util.find_spec(package) is None]


# Data, and what all apps have in common.


@cache
def digits() -> tuple[Tensor, Tensor]:
    found = load_digits()
    return torch.tensor(found.images / 16, dtype=torch.float32)[:, None], torch.tensor(found.target)


@cache
def rows() -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(3)
    values = torch.randn(100, 8, generator=stream)
    return values, (values.sum(1) + torch.randn(100, generator=stream) > 0).float()


def mine(context: Context, values: Sequence[Any]) -> list[Any]:
    """A client's few examples of each of several tensors or arrays."""
    first = int(context.node_config["partition-id"]) * EXAMPLES
    return [value[first : first + EXAMPLES] for value in values]


def server(
    start: Callable[[], ArrayRecord], strategy: Callable[[], FedAvg] | None = None, rounds: int = 1
) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        chosen = (strategy or (lambda: FedAvg(fraction_evaluate=0.0)))()
        chosen.start(grid, start(), num_rounds=rounds, train_config=ConfigRecord({"lr": 0.1}))

    return app


def client(mods: Mods, train: Callable[[ArrayRecord, Context, Message], ArrayRecord]) -> ClientApp:
    app = ClientApp(mods=[*mods])

    @app.train()
    def train_round(message: Message, context: Context) -> Message:
        arrays = train(message.content.array_records["arrays"], context, message)
        metrics = MetricRecord({"num-examples": EXAMPLES, "train_loss": 0.5})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    return app


def torch_client(
    mods: Mods, network: Callable[[], nn.Module], train: Callable[[nn.Module, Context], None]
) -> ClientApp:
    def answered(arrays: ArrayRecord, context: Context, message: Message) -> ArrayRecord:
        net = network()
        net.load_state_dict(arrays.to_torch_state_dict())
        train(net, context)
        return ArrayRecord(net.state_dict())

    return client(mods, answered)


def torch_apps(mods: Mods, network: Callable[[], nn.Module], train: Callable[[nn.Module, Context], None]) -> Apps:
    return torch_client(mods, network, train), server(lambda: ArrayRecord(network().state_dict()))


def step(net: nn.Module, loss: Tensor) -> None:
    optimizer = torch.optim.SGD([value for value in net.parameters() if value.requires_grad], lr=0.1)
    loss.backward()
    optimizer.step()


# Networks, which tap.model names where it cannot be seen.


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.out = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(512, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(torch.tanh(self.conv(x)).flatten(1))))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 64))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x.flatten(1)))


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


def densenet() -> nn.Module:
    from monai.networks.nets import DenseNet

    return DenseNet(2, 1, 4, init_features=4, growth_rate=2, block_config=(1, 1), norm="instance", act="tanh")


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4,
        num_channels=1, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def bert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=60, dim=16, n_layers=1, n_heads=2, hidden_dim=32, max_position_embeddings=12, num_labels=2,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    )  # fmt: skip
    return DistilBertForSequenceClassification(config)


def gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=60, n_embd=32, n_layer=1, n_head=2, n_positions=12, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(gpt(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))


def trained_on_digits(net: nn.Module, context: Context) -> None:
    images, labels = mine(context, digits())
    step(net.train(), F.cross_entropy(net(images), labels))


def sentences() -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(5)
    return torch.randint(3, 60, (60, 8), generator=stream), torch.randint(2, (60,), generator=stream)


IMAGES = "recovered 12 of 12 images"
THERE = "tests.flower.shapes"


@shape("quickstart", IMAGES)
def quickstart(mods: Mods) -> Apps:
    return torch_apps(mods, Cnn, trained_on_digits)


@shape("advanced", IMAGES, privatise='pass = ["evaluate"]\nsend = ["num-examples"]\n')
def advanced(mods: Mods) -> Apps:
    """A rate that the server sends, a head that the client keeps in its state, evaluation, weights by examples."""

    def train(arrays: ArrayRecord, context: Context, message: Message) -> ArrayRecord:
        net = Cnn()
        net.load_state_dict(arrays.to_torch_state_dict())
        images, labels = mine(context, digits())
        rate = float(message.content.config_records["config"]["lr"])
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        context.state["head"] = ArrayRecord(net.out.state_dict())
        return ArrayRecord(net.state_dict())

    app = client(mods, train)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        net = Cnn()
        net.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        images, labels = mine(context, digits())
        right = float((net(images).argmax(1) == labels).float().mean())
        return Message(RecordDict({"metrics": MetricRecord({"accuracy": right, "num-examples": 4})}), reply_to=message)

    return app, server(lambda: ArrayRecord(Cnn().state_dict()), FedAvg, rounds=2)


@shape("custom mods", IMAGES)
def custom_mods(mods: Mods) -> Apps:
    """A mod of the app's own that counts parameters, before and after."""

    def counting(message: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(message, context)
        reply.content["count"] = ConfigRecord({"arrays": len(reply.content.array_records["arrays"])})
        return reply

    return torch_apps([counting, *mods], Cnn, trained_on_digits)


@shape("MONAI", "of 12 images", needs=("monai",), model=f"{THERE}:densenet")
def monai(mods: Mods) -> Apps:
    def train(net: nn.Module, context: Context) -> None:
        images, labels = mine(context, digits())
        step(net.train(), F.cross_entropy(net(F.interpolate(images, scale_factor=2.0)), labels % 4))

    return torch_apps(mods, densenet, train)


@shape("Opacus", "of the noise of Opacus")
def opacus(mods: Mods) -> Apps:
    """Each example's gradient is clipped and noised by the engine, which the tap recognises."""
    from opacus import PrivacyEngine

    def train(net: nn.Module, context: Context) -> None:
        loader = DataLoader(TensorDataset(*mine(context, digits())), batch_size=EXAMPLES)
        optimizer = torch.optim.SGD(net.train().parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            private, optimizer, batches = PrivacyEngine().make_private(
                module=net, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
                poisson_sampling=False,
            )  # fmt: skip
            for images, labels in batches:
                optimizer.zero_grad()
                F.cross_entropy(private(images), labels).backward()
                optimizer.step()

    return torch_apps(mods, Cnn, train)


@shape("table", "of 12 rows")
def table(mods: Mods) -> Apps:
    def train(net: nn.Module, context: Context) -> None:
        values, told = mine(context, rows())
        step(net.train(), F.binary_cross_entropy(net(values), told[:, None]))

    return torch_apps(mods, Mlp, train)


@shape("regression", "of 12 rows")
def regression(mods: Mods) -> Apps:
    def train(net: nn.Module, context: Context) -> None:
        (values,) = mine(context, rows()[:1])
        step(net.train(), F.mse_loss(net(values), values.sum(1, keepdim=True)))

    return torch_apps(mods, Regression, train)


@shape("autoencoder", "of 12 images")
def autoencoder(mods: Mods) -> Apps:
    def train(net: nn.Module, context: Context) -> None:
        (images,) = mine(context, digits()[:1])
        step(net.train(), F.mse_loss(net(images), images.flatten(1)))

    return torch_apps(mods, Autoencoder, train)


@shape("ViT", "of 12 images", needs=("transformers",), model=f"{THERE}:vit")
def vit_app(mods: Mods) -> Apps:
    def train(net: nn.Module, context: Context) -> None:
        images, labels = mine(context, digits())
        step(net.train(), net(pixel_values=images, labels=labels).loss)

    return torch_apps(mods, vit, train)


@shape("Hugging Face", "of 12 sentences", needs=("transformers",), model=f"{THERE}:bert")
def hugging_face(mods: Mods) -> Apps:
    def train(net: nn.Module, context: Context) -> None:
        tokens, labels = mine(context, sentences())
        batch = {"labels": labels, "input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        step(net.train(), net(**batch).loss)

    return torch_apps(mods, bert, train)


@shape("language model", "of 12 sentences", needs=("transformers",), model=f"{THERE}:gpt")
def language_model(mods: Mods) -> Apps:
    def train(net: nn.Module, context: Context) -> None:
        (tokens,) = mine(context, sentences()[:1])
        step(net.train(), net(input_ids=tokens, labels=tokens).loss)

    return torch_apps(mods, gpt, train)


@shape("language model, LoRA", "1-0", needs=("transformers", "peft"), model=f"{THERE}:lora")
def adapted(mods: Mods) -> Apps:
    """Only the adapter travels, as peft names it."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    def train(arrays: ArrayRecord, context: Context, message: Message) -> ArrayRecord:
        net = lora()
        set_peft_model_state_dict(net, arrays.to_torch_state_dict())
        (tokens,) = mine(context, sentences()[:1])
        step(net.train(), net(input_ids=tokens, labels=tokens).loss)
        return ArrayRecord(get_peft_model_state_dict(net))

    return client(mods, train), server(lambda: ArrayRecord(get_peft_model_state_dict(lora())))


@shape("Trainer", "of 12 sentences", needs=("transformers", "accelerate"), model=f"{THERE}:bert")
def trainer(mods: Mods) -> Apps:
    from transformers import Trainer, TrainingArguments

    def train(net: nn.Module, context: Context) -> None:
        tokens, labels = mine(context, sentences())
        examples = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]
        arguments = TrainingArguments(
            tempfile.mkdtemp(), per_device_train_batch_size=EXAMPLES, num_train_epochs=1, report_to=[], use_cpu=True,
            optim="sgd", learning_rate=0.1, max_grad_norm=0.0, save_strategy="no", disable_tqdm=True,
            logging_strategy="no",
        )  # fmt: skip
        Trainer(net, arguments, train_dataset=examples).train()

    return torch_apps(mods, bert, train)


@shape("accelerate", IMAGES, needs=("accelerate",))
def accelerated(mods: Mods) -> Apps:
    from accelerate import Accelerator

    def train(net: nn.Module, context: Context) -> None:
        accelerator = Accelerator(cpu=True)
        loader = DataLoader(TensorDataset(*mine(context, digits())), batch_size=EXAMPLES)
        net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(net.train()(images), labels))
            optimizer.step()

    return torch_apps(mods, Cnn, train)


def lit_autoencoder() -> nn.Module:
    """Its parts are run one after the other, and its own forward is not."""
    import lightning

    class LitAutoencoder(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            own = Autoencoder()
            self.encoder, self.decoder = own.encoder, own.decoder

        def training_step(self, batch: Any, _: int) -> Tensor:
            images = batch[0].flatten(1)
            return F.mse_loss(self.decoder(self.encoder(images)), images)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return LitAutoencoder()


@shape("Lightning", "of 12 rows", needs=("lightning",), model=f"{THERE}:lit_autoencoder")
def lightning_app(mods: Mods) -> Apps:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def train(net: nn.Module, context: Context) -> None:
        loader = DataLoader(TensorDataset(*mine(context, digits())), batch_size=EXAMPLES)
        keys = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lightning.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **keys).fit(net, loader)

    return torch_apps(mods, lit_autoencoder, train)


@shape("fastai", IMAGES, needs=("fastai",))
def fastai_app(mods: Mods) -> Apps:
    from fastai.callback import progress  # noqa: F401 - which gives learners no_bar
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader as Loader
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.optimizer import OptimWrapper

    def train(net: nn.Module, context: Context) -> None:
        examples = [*zip(*mine(context, digits()), strict=True)]
        data = DataLoaders(Loader(examples, bs=EXAMPLES), Loader(examples, bs=EXAMPLES))
        options = partial(OptimWrapper, opt=torch.optim.SGD)
        learner = Learner(data, net, loss_func=CrossEntropyLossFlat(), opt_func=options, lr=0.1, wd=0.0)
        with learner.no_bar(), learner.no_logging():
            learner.fit(1)

    return torch_apps(mods, Cnn, train)


def table_records(client: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the trees: all clients have the same 60."""
    return rows()[0][:60].numpy(), rows()[0][60:].numpy()


def digit_records(client: int) -> tuple[np.ndarray, np.ndarray]:
    images = digits()[0].flatten(1).numpy()
    return images[client * EXAMPLES :][:EXAMPLES], images[100:140]


# Frameworks that are not PyTorch: one digit a message, so that the first layer tells it whole.

CLOSED = "neurons of the first dense layer agree on 1 vector of 64 numbers: it is an example's input, or a mean"


def one(context: Context) -> tuple[np.ndarray, np.ndarray]:
    images, labels = mine(context, digits())
    return images[:1].flatten(1).numpy(), labels[:1].numpy()


@shape("JAX", CLOSED, needs=("jax", "flax", "optax"))
def jax_app(mods: Mods) -> Apps:
    import jax
    import optax
    from flax import linen

    class Net(linen.Module):  # type: ignore[misc]
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(10)(linen.relu(linen.Dense(32)(x)))

    net = Net()
    start, tree = jax.tree.flatten(net.init(jax.random.PRNGKey(0), np.zeros((1, 64), np.float32)))

    def train(arrays: ArrayRecord, context: Context, message: Message) -> ArrayRecord:
        images, labels = one(context)

        def loss(tree: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(net.apply(tree, images), labels).mean()

        before = jax.tree.unflatten(tree, arrays.to_numpy_ndarrays())
        after = jax.tree.map(lambda value, slope: value - 0.1 * slope, before, jax.grad(loss)(before))
        return ArrayRecord([np.asarray(value) for value in jax.tree.leaves(after)])

    return client(mods, train), server(lambda: ArrayRecord([np.asarray(value) for value in start]))


@shape("Keras", CLOSED, needs=("keras",))
def keras_app(mods: Mods) -> Apps:
    os.environ.setdefault("KERAS_BACKEND", "jax" if importlib.util.find_spec("jax") else "torch")
    import keras

    keras.utils.set_random_seed(0)

    def network() -> Any:
        layers = [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10, activation="softmax")]
        net = keras.Sequential([keras.Input((64,)), *layers])
        net.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        return net

    def train(arrays: ArrayRecord, context: Context, message: Message) -> ArrayRecord:
        net = network()
        net.set_weights(arrays.to_numpy_ndarrays())
        net.fit(*one(context), epochs=1, batch_size=1, verbose=0)
        return ArrayRecord(net.get_weights())

    return client(mods, train), server(lambda: ArrayRecord(network().get_weights()))


@shape("NumPy", "by records in the space", settings=f'records = "{THERE}:digit_records"')
def numpy_app(mods: Mods) -> Apps:
    def train(arrays: ArrayRecord, context: Context, message: Message) -> ArrayRecord:
        images, labels = mine(context, digits())
        (weights,) = arrays.to_numpy_ndarrays()
        flat, sure = images.flatten(1).numpy(), np.eye(10)[labels.numpy()]
        made = np.exp(flat @ weights)
        return ArrayRecord([weights - 0.1 * flat.T @ (made / made.sum(1, keepdims=True) - sure)])

    return client(mods, train), server(lambda: ArrayRecord([np.zeros((64, 10))]))


@shape("scikit-learn", CLOSED)
def sklearn_app(mods: Mods) -> Apps:
    from sklearn.neural_network import MLPClassifier

    def network() -> Any:
        net = MLPClassifier((32,), solver="sgd", learning_rate_init=0.1, random_state=0)
        images, labels = digits()
        return net.partial_fit(images[:1].flatten(1).numpy(), labels[:1].numpy(), classes=np.arange(10))

    def train(arrays: ArrayRecord, context: Context, message: Message) -> ArrayRecord:
        net = network()
        values = [value.copy() for value in arrays.to_numpy_ndarrays()]
        net.coefs_, net.intercepts_ = values[:2], values[2:]
        net._optimizer.params = values
        net._optimizer.velocities = [np.zeros_like(value) for value in values]
        net.partial_fit(*one(context))
        return ArrayRecord([*net.coefs_, *net.intercepts_])

    def start() -> ArrayRecord:
        net = network()
        return ArrayRecord([*net.coefs_, *net.intercepts_])

    return client(mods, train), server(start)


class Bagging(FedAvg):
    """Takes the first reply's bytes: how trees are joined is not what is looked at."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        first = next(iter(replies))
        if first.has_error():
            raise InputError(first.error.reason)
        return first.content.array_records["arrays"], MetricRecord({})


REFUSED = "bytes of a model, such as trees, have no update that noise fits"
TREES = "by values that are thresholds of its trees"
TABLE = f'records = "{THERE}:table_records"'


def trees(mods: Mods, fitted: Callable[[Context], bytes]) -> Apps:
    def train(arrays: ArrayRecord, context: Context, message: Message) -> ArrayRecord:
        return ArrayRecord([np.frombuffer(fitted(context), np.uint8)])

    start = ArrayRecord([np.frombuffer(b"", np.uint8)])
    return client(mods, train), server(lambda: start, lambda: Bagging(fraction_evaluate=0.0))


@shape("XGBoost", TREES, REFUSED, needs=("xgboost",), settings=TABLE)
def xgboost_app(mods: Mods) -> Apps:
    import xgboost

    def fitted(context: Context) -> bytes:
        values, told = (value[:60].numpy() for value in rows())
        settings = {"objective": "binary:logistic", "max_depth": 2, "nthread": 1}
        booster = xgboost.train(settings, xgboost.DMatrix(values, label=told), num_boost_round=2)
        return bytes(booster.save_raw("json"))

    return trees(mods, fitted)


@shape("CatBoost", TREES, REFUSED, needs=("catboost",), settings=TABLE)
def catboost_app(mods: Mods) -> Apps:
    from catboost import CatBoostClassifier

    def fitted(context: Context) -> bytes:
        values, told = (value[:60].numpy() for value in rows())
        model = CatBoostClassifier(iterations=2, depth=2, thread_count=1, verbose=False, allow_writing_files=False)
        model.fit(values, told)
        path = Path(tempfile.mkdtemp()) / "model.json"
        model.save_model(str(path), format="json")
        return path.read_bytes()

    return trees(mods, fitted)


def asking(kind: str = "query") -> ServerApp:
    """A server that asks every client once, and adds nothing up."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        content = RecordDict({"config": ConfigRecord({"server-round": 1})})
        nodes = [*grid.get_node_ids()]
        replies = [*grid.send_and_receive([Message(content, node, kind) for node in nodes])]
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed:
            raise InputError(failed[0])

    return app


def answering(mods: Mods, answer: Callable[[Context], RecordDict]) -> Apps:
    app = ClientApp(mods=[*mods])

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return Message(answer(context), reply_to=message)

    return app, asking()


NOT_COVERED = "privatise covers replies to train, not to query"


@shape("pandas", "whole numbers that add up to 60, as counts do", NOT_COVERED, needs=("pandas",))
def pandas_app(mods: Mods) -> Apps:
    import pandas

    def answer(context: Context) -> RecordDict:
        frame = pandas.DataFrame({"sepal": rows()[0][:60, 0].numpy()})
        counts, _ = np.histogram(frame["sepal"], bins=6)
        return RecordDict({"histogram": ArrayRecord([counts])})

    return answering(mods, answer)


@shape("Kaplan-Meier", "survival/T is no update of what was sent, and leaves as it is", NOT_COVERED)
def kaplan_meier(mods: Mods) -> Apps:
    def answer(context: Context) -> RecordDict:
        (values,) = mine(context, rows()[:1])
        lasted, ended = values[:, 0].abs().numpy() * 30, values[:, 1].numpy() > 0
        found = {"T": lasted, "E": ended.astype(np.int64)}
        return RecordDict({"survival": ArrayRecord({name: _array(value) for name, value in found.items()})})

    return answering(mods, answer)


def _array(value: np.ndarray) -> Any:
    from flwr.app import Array

    return Array(value)


@shape("vertical", "leaves as it is", NOT_COVERED)
def vertical(mods: Mods) -> Apps:
    """Embeddings of each example leave, the server trains the head."""

    def answer(context: Context) -> RecordDict:
        torch.manual_seed(0)
        (values,) = mine(context, rows()[:1])
        return RecordDict({"embedding": ArrayRecord([nn.Linear(8, 4)(values).detach().numpy()])})

    return answering(mods, answer)


class OldClient(NumPyClient):
    """Its message and reply use records of their own."""

    def __init__(self, context: Context) -> None:
        self.net, self.own = Cnn(), context

    def fit(self, parameters: Any, config: Any) -> Any:
        state = dict(zip(self.net.state_dict(), map(torch.tensor, parameters), strict=True))
        self.net.load_state_dict(state)
        trained_on_digits(self.net, self.own)
        return [value.numpy() for value in self.net.state_dict().values()], EXAMPLES, {}


def old_server(workflow: Any = None) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        start = ndarrays_to_parameters([value.numpy() for value in Cnn().state_dict().values()])
        strategy = OldFedAvg(fraction_evaluate=0.0, initial_parameters=start)
        legacy = LegacyContext(context=context, config=ServerConfig(num_rounds=1), strategy=strategy)
        DefaultWorkflow(fit_workflow=workflow)(grid, legacy)

    return app


@shape("NumPyClient", IMAGES, model=f"{THERE}:Cnn")
def numpy_client(mods: Mods) -> Apps:
    return ClientApp(client_fn=lambda context: OldClient(context).to_client(), mods=[*mods]), old_server()


@shape("secure aggregation", "secure aggregation: attacked is the mean of 3 uploads", model=f"{THERE}:Cnn")
def secure_aggregation(mods: Mods) -> Apps:
    app = ClientApp(client_fn=lambda context: OldClient(context).to_client(), mods=[secaggplus_mod, *mods])
    return app, old_server(SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))


# Kinds that nothing was made for: what is said of them was not known before they were run.


@shape("own names", CLOSED, privatise='weight = "n"\n')
def own_names(mods: Mods) -> Apps:
    """A NumPy network whose arrays, record and weight have names that no library gives them."""
    stream, record = np.random.default_rng(0), "model-weights"
    shapes = {"encoder/kernel": (64, 24), "encoder/offset": (24,), "decoder/kernel": (24, 10), "decoder/offset": (10,)}
    start = {name: stream.normal(size=shape) / 8 for name, shape in shapes.items()}
    app = ClientApp(mods=[*mods])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        images, labels = one(context)
        first, offset, last, bias = message.content.array_records[record].to_numpy_ndarrays()
        hidden = np.tanh(images @ first + offset)
        made = np.exp(hidden @ last + bias)
        slope = made / made.sum(1, keepdims=True) - np.eye(10)[labels]
        back = (slope @ last.T) * (1 - hidden**2)
        slopes = (images.T @ back, back.sum(0), hidden.T @ slope, slope.sum(0))
        after = [value - 0.1 * each for value, each in zip((first, offset, last, bias), slopes, strict=True)]
        arrays = ArrayRecord({name: _array(value) for name, value in zip(shapes, after, strict=True)})
        return Message(RecordDict({record: arrays, "facts": MetricRecord({"n": 1})}), reply_to=message)

    def strategy() -> FedAvg:
        return FedAvg(fraction_evaluate=0.0, weighted_by_key="n", arrayrecord_key=record)

    return app, server(lambda: ArrayRecord({name: _array(value) for name, value in start.items()}), strategy)


@shape("own query", "means/of classes is no update of what was sent, and leaves as it is", NOT_COVERED)
def own_query(mods: Mods) -> Apps:
    """An action of its own: means by class, and what a config holds of patients."""
    app = ClientApp(mods=[*mods])

    @app.query("profile")
    def profile(message: Message, context: Context) -> Message:
        images, labels = mine(context, digits())
        means = np.stack([images[labels == label].sum(0).flatten().numpy() for label in range(10)])
        facts = ConfigRecord({"centre": "north", "ages": [61.0, 47.5], "scan": b"\x01\x02"})
        content = RecordDict({"means": ArrayRecord({"of classes": _array(means)}), "facts": facts})
        return Message(content, reply_to=message)

    return app, asking("query.profile")


class Segmenter(nn.Module):
    """Tells each pixel's class."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@shape("segmentation", "cross_entropy compares its output with a target of (8, 8) for each example")
def segmentation(mods: Mods) -> Apps:
    def train(net: nn.Module, context: Context) -> None:
        (images,) = mine(context, digits()[:1])
        step(net.train(), F.cross_entropy(net(images), (images[:, 0] > 0.5).long()))

    return torch_apps(mods, Segmenter, train)


# Running them.


@dataclass(frozen=True)
class Said:
    """What was said of an app, and what it said itself."""

    summary: TappedSummary | None  # of `fedpriv attack`; `None`: nothing left, since it was refused
    refused: str = ""
    ledgers: Mapping[str, Any] = field(default_factory=dict)
    logged: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return " ".join([*(self.summary.verdict if self.summary else ()), self.refused])


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, line: logging.LogRecord) -> None:
        self.lines.append(line.getMessage())


def ask(name: str, home: Path, protected: bool, iterations: int = 120) -> Said:
    """Run an app with the tap, or with the tap and privatise, and attack what left."""
    chosen = SHAPES[name]
    home.mkdir(parents=True, exist_ok=True)
    text = f"[tap]\n{f'model = {chr(34)}{chosen.model}{chr(34)}' if chosen.model else ''}\n{chosen.settings}\n"
    if protected:
        text += f'[mechanism]\nname = "gaussian"\nclip_norm = 1.0\nsigma = 1.0\n[privatise]\n{chosen.privatise}'
        text += f'folder = "{home / "ledger"}"\n'
    path = home / "fedpriv.toml"
    path.write_text(text)
    os.environ["FEDPRIV_RUNS"] = str(home / "runs")
    kept = _Kept()
    logging.getLogger("fedpriv").addHandler(kept)
    refused = ""
    try:
        torch.manual_seed(0)
        apps = chosen.build([tap(path), *([privatise(path)] if protected else [])])
        run_server(apps[1], OneProcess(apps[0], CLIENTS))
    except Exception as error:  # noqa: BLE001 - what a user would see
        refused = f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("fedpriv").removeHandler(kept)
    ledgers = {each.name: json.loads(each.read_text()) for each in (home / "ledger").glob("*.json")}
    folder = home / "runs" / "tap-1"
    if not (folder / "tap.json").exists():
        return Said(None, refused, ledgers, tuple(kept.lines))
    budget = [f"adversary.iga.iterations={iterations}", "adversary.text_map.iterations=4", "adversary.text_map.kicks=0"]
    summary = attack_tapped(folder, [], [], budget, Silent())
    return Said(summary, refused, ledgers, tuple(kept.lines))


def main(names: Sequence[str]) -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    for name in names or SHAPES:
        if absent := missing(name):
            print(f"== {name}: not installed: {', '.join(absent)}")
            continue
        for protected in (False, True):
            said = ask(name, Path(tempfile.mkdtemp()), protected)
            print(f"== {name}, {'privatise' if protected else 'tap'}{': ' + said.refused if said.refused else ''}")
            for line in said.summary.verdict if said.summary else ():
                print("  ", line)
            for line in said.summary.warnings if said.summary else ():
                print("   warning:", line)
            for line in dict.fromkeys(said.logged):
                print("   log:", line[:300])


if __name__ == "__main__":
    importlib.import_module(THERE).main(sys.argv[1:])  # so that networks are defined in a module of this name
