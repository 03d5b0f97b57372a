"""A client as a teacher: trained as a plain loop does, asked once, never a refusal that tells of an example."""

import copy
import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from fedpriv.algorithms.pate import client as knowledge
from fedpriv.algorithms.pate.client import teachers_votes
from fedpriv.algorithms.pate.teachers import questions
from fedpriv.algorithms.secure_aggregation.server import ask_for_masked_sum
from fedpriv.clients.app import client_app
from fedpriv.core.config import Experiment
from fedpriv.core.errors import RunFailedError
from fedpriv.core.randomness import numpy_stream
from fedpriv.core.wire import pack
from fedpriv.core.world import World, build_world
from fedpriv.engines.inline import InlineGrid, assume_server_identity
from fedpriv.mechanisms.machinery.whole_numbers import least_survivors
from fedpriv.server.exchange import Federation
from tests.integration.small import experiment

EPOCHS, BATCH, RATE = 3, 16, 0.1


def votes(pate: dict[str, object] | None = None, **federation: object) -> Experiment:
    return experiment(
        federation={"algorithm": "pate", "clients": 4, "rounds": 1, **federation},
        training={"batch_size": BATCH, "learning_rate": RATE},
        pate={"queries": 20, "local_epochs": EPOCHS, "aggregator": "gnmax", "target_epsilon": 500.0, **(pate or {})},
    )


def data(world: World, client: int, number: int, teachers: int) -> tuple[Tensor, Tensor]:
    order = numpy_stream(world.experiment.seed, "teachers", client).permutation(len(world.partitions[client]))
    return world.examples(client, np.array_split(order, teachers)[number])


def batches(world: World, client: int, number: int, examples: int) -> list[Tensor]:
    stream = numpy_stream(world.experiment.seed, "teacher", client, number)
    passes = [torch.from_numpy(stream.permutation(examples)) for _ in range(EPOCHS)]
    return [rows for order in passes for rows in order[: examples // BATCH * BATCH].split(BATCH)]


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_a_teacher_is_what_a_plain_loop_makes_of_it(decay: float) -> None:
    settings = votes({"teachers_per_client": 2})
    training = settings.training.model_copy(update={"weight_decay": decay})
    world = build_world(settings.model_copy(update={"training": training}))
    found = teachers_votes(world, 1, questions(world))
    for number in range(2):
        inputs, labels = data(world, 1, number, 2)
        model = copy.deepcopy(world.model)
        world.initial.load_into(model)
        for rows in batches(world, 1, number, len(labels)):
            model.zero_grad()
            cross_entropy(model(inputs[rows]), labels[rows]).backward()
            with torch.no_grad():
                for value in model.parameters():
                    value -= RATE * (value.grad + decay * value)  # type: ignore[operator]
        assert torch.equal(found[number].long(), model(world.network_input(questions(world))).argmax(1))


@pytest.mark.parametrize(("reduce", "same"), [(Tensor.sum, True), (Tensor.mean, False)])
def test_a_stack_of_teachers_has_to_sum_their_losses(reduce: Callable[[Tensor], Tensor], same: bool) -> None:
    """One teacher alone against a stack of eight: with the mean of the losses, steps are an eighth as long (SGD)."""
    world = build_world(votes({"teachers_per_client": 8}))
    pairs = [data(world, 0, number, 8) for number in range(8)]
    size = min(len(labels) for _, labels in pairs)
    inputs, labels = (torch.stack([pair[k][:size] for pair in pairs]) for k in (0, 1))

    def trained(models: list[nn.Module], images: Tensor, classes: Tensor) -> Tensor:
        parameters, buffers = stack_module_state(models)
        base = copy.deepcopy(models[0]).to("meta")
        for _ in range(20):
            outputs = vmap(lambda p, b, x: functional_call(base, (p, b), (x,)))(parameters, buffers, images)
            losses = torch.stack([cross_entropy(each, known) for each, known in zip(outputs, classes, strict=True)])
            gradients = torch.autograd.grad(reduce(losses), list(parameters.values()))
            with torch.no_grad():
                for value, gradient in zip(parameters.values(), gradients, strict=True):
                    value -= 0.5 * gradient
        return torch.cat([value.detach()[0].flatten() for value in parameters.values()])

    models = [copy.deepcopy(world.model) for _ in range(8)]
    for model in models:
        world.initial.load_into(model)
    alone = trained(copy.deepcopy(models[:1]), inputs[:1], labels[:1])
    assert torch.allclose(trained(models, inputs, labels), alone, atol=1e-5) is same


def test_a_model_that_raises_votes_for_class_0_and_says_so_to_its_owner_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raising(*_: object) -> None:
        raise ValueError("image 3 is blank")

    world = build_world(votes())
    monkeypatch.setattr(knowledge, "teach", raising)
    with caplog.at_level(logging.WARNING):
        assert not teachers_votes(world, 0, questions(world)).any()
    assert "votes for class 0" in caplog.text


def asked(federation: Federation, images: Tensor) -> RecordDict:
    task = ConfigRecord({"experiment": federation.task, "round": 1})
    return RecordDict({"questions": pack({"images": images}), "task": task})


def federation_of(settings: Experiment) -> Federation:
    world = build_world(settings)
    assume_server_identity(1)
    clients = settings.federation.clients
    grid = InlineGrid(client_app(world.secret), clients)
    return Federation(grid, {client: client + 1 for client in range(clients)}, world, settings.model_dump_json())


def test_a_client_answers_one_set_of_images_and_the_same_again() -> None:
    federation = federation_of(votes())
    images = questions(federation.world)
    first, again = (federation.reached.send("train.votes", 1, {0: asked(federation, images)})[0] for _ in range(2))
    assert first.content.array_records["upload"] == again.content.array_records["upload"]
    other = federation.reached.send("train.votes", 1, {0: asked(federation, images.flip(0))})[0]
    assert other.has_error()
    assert "was answered before" in other.error.reason


@pytest.mark.parametrize("images", [torch.zeros((2, 1, 8, 7), dtype=torch.uint8), torch.zeros((2, 1, 8, 8))])
def test_what_is_no_image_of_the_run_is_refused(images: Tensor) -> None:
    federation = federation_of(votes())
    reply = federation.reached.send("train.votes", 1, {0: asked(federation, images)})[0]
    assert reply.has_error()
    assert "no images of this run" in reply.error.reason


def test_votes_that_nobody_may_see_are_not_sent_as_they_are() -> None:
    federation = federation_of(votes({"noise_at": "clients"}, secure_aggregation=True))
    reply = federation.reached.send("train.votes", 1, {0: asked(federation, questions(federation.world))})[0]
    assert reply.has_error()
    assert "nobody sees votes" in reply.error.reason


def test_no_sum_of_fewer_clients_than_its_noise_counts_on() -> None:
    federation = federation_of(votes({"noise_at": "clients"}, secure_aggregation=True))
    question = asked(federation, questions(federation.world))
    assert least_survivors(4) == 3
    with pytest.raises(RunFailedError, match="shares of 2 clients are too few"):
        ask_for_masked_sum(federation.reached, 1, {0: question, 1: question}, "train.masked_votes", 200)
