"""Thousands of mutated inputs for each reader of what others wrote: it reads them or says clearly why not.

Seeded, so that a failure repeats. A reader that raised anything but its own error would end a run with a traceback, at
the word of whoever wrote the file or sent the message.
"""

import json
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from safetensors.torch import save

from fedpriv.attacks.observation import list_observations, read_observation
from fedpriv.core.asked_log import check_unchanged, questions, replay
from fedpriv.core.budget import Budget
from fedpriv.core.config import Experiment, load_experiment
from fedpriv.core.errors import InputError
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.records import Failure
from fedpriv.core.runs import Checkpoint, RunFolder
from fedpriv.core.wire import pack
from fedpriv.core.world import State, build_world
from fedpriv.engines.inline import assume_server_identity
from fedpriv.server.aggregation import ServerOptimizer
from fedpriv.server.uploads import Allowed, Upload, read_upload
from tests.integration.small import experiment
from tests.mutations import mutated_bytes, mutated_tree

TIMES = 4_000

pytestmark = pytest.mark.slow


def fuzz(read: Callable[[random.Random], object], enough: int = 20, times: int = TIMES) -> None:
    """Call ``read`` with as many generators: it may raise InputError only, and must take and refuse some inputs."""
    refused = 0
    for seed in range(times):
        try:
            read(random.Random(seed))
        except InputError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1, f"seed {seed}: {error}"
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert enough <= refused <= times - enough


def mutated_safetensors(rng: random.Random, content: bytes) -> bytes:
    """The file's bytes changed anywhere, or its header as a tree, with its length right."""
    if rng.random() < 0.5:
        return mutated_bytes(rng, content)
    (length,) = struct.unpack("<Q", content[:8])
    header = json.dumps(mutated_tree(rng, json.loads(content[8 : 8 + length]))).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def test_the_observation_reader(tmp_path: Path) -> None:
    attacked = {"attacks": ["iga"], "victims": 1, "iga": {"iterations": 1}, "knows_labels": True}
    settings = experiment(
        adversary=attacked, mechanism={"name": "hgm", "sigma": 1.0}, model={"hidden": [1]}, federation={"rounds": 1}
    )
    start_run(settings, tmp_path / "run", "", Silent())
    (path,) = list_observations(tmp_path / "run" / "observations")
    about, tensors = path.with_suffix(".json"), path
    sound = about.read_bytes(), tensors.read_bytes()

    def read(rng: random.Random) -> None:
        text, content = sound
        match rng.randrange(3):
            case 0:
                text = mutated_bytes(rng, text)
            case 1:
                text = json.dumps(mutated_tree(rng, json.loads(text))).encode()
            case _:
                content = mutated_safetensors(rng, content)
        about.write_bytes(text)
        tensors.write_bytes(content)
        read_observation(tensors)

    fuzz(read)


def test_the_config_reader(tmp_path: Path) -> None:
    trees = [experiment().model_dump(mode="json", exclude_none=True), Experiment().model_dump(mode="json")]
    for tree in trees:
        tree["federation"] = {key: value for key, value in tree["federation"].items() if value is not None}
    path = tmp_path / "experiment.toml"
    texts = [tomli_w.dumps(without_none(tree)).encode() for tree in trees]

    def read(rng: random.Random) -> None:
        which = rng.randrange(2)
        overrides = []
        match rng.randrange(3):
            case 0:
                path.write_bytes(mutated_bytes(rng, texts[which]))
            case 1:
                path.write_text(tomli_w.dumps(mutated_tree(rng, without_none(trees[which]))), encoding="utf-8")
            case _:
                path.write_bytes(texts[which])
                sound = rng.choice(["mechanism.epsilon=50", "model.hidden=[3, 4]", 'name="x"', "data.alpha=0.1"])
                overrides = [mutated_bytes(rng, sound.encode()).decode(errors="replace")]
        load_experiment(path, overrides)

    fuzz(read, times=2_000)


def test_the_record_of_questions(tmp_path: Path) -> None:
    """Read, compared with the run, and counted."""
    world = build_world(experiment(mechanism={"name": "gaussian", "sigma": 0.3}, federation={"clients": 3}))
    folder = RunFolder.create(tmp_path / "run", world.experiment)
    for number in (1, 2):
        for line in questions(world, number, [(world.initial, (0, 1, 2))]):
            folder.append_asked(line)
    path = folder.path / "asked.jsonl"
    whole, first, second = path.read_bytes(), *map(json.loads, path.read_text().splitlines())

    def read(rng: random.Random) -> None:
        lines = (first, mutated_tree(rng, second))
        as_trees = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        path.write_bytes(as_trees if rng.random() < 0.8 else mutated_bytes(rng, whole))
        check_unchanged(world, folder)
        replay(Budget(world.experiment, world.plans), folder.asked())

    fuzz(read)


def without_none(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: without_none(value) for key, value in tree.items() if value is not None}
    return tree


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_checkpoint_reader(optimizer: str, tmp_path: Path) -> None:
    settings = experiment(federation={"server_optimizer": optimizer, "server_momentum": 0.5})
    start = State({"a": torch.ones(2, 3), "b": torch.zeros(2)}, {"running": torch.zeros(2)})
    sound = ServerOptimizer(settings, start)
    sound.step(start)
    folder = RunFolder.create(tmp_path / "run", settings)
    folder.save_checkpoint(Checkpoint(1, sound.tensors()))
    path = folder.path / "checkpoint" / "server.safetensors"
    content = path.read_bytes()

    def read(rng: random.Random) -> None:
        path.write_bytes(mutated_safetensors(rng, content))
        checkpoint = folder.load_checkpoint()
        assert checkpoint is not None
        fresh = ServerOptimizer(settings, start)
        fresh.load(checkpoint.tensors, checkpoint.round)
        fresh.step(start)

    fuzz(read)


LIKE = State({"a": torch.ones(2, 3), "b": torch.zeros(2)}, {"running": torch.zeros(2)})


def mutated_array(rng: random.Random, array: Array) -> Array:
    dtype, shape, stype, data = array.dtype, tuple(array.shape), array.stype, array.data
    match rng.randrange(5):
        case 0:
            dtype = rng.choice(
                ["float64", "object", "U4", "V0", "O", "", "f4,f4", "float32, (2,)", "m8[s]", "<f4", "complex64"]
            )
        case 1:
            shape = rng.choice([(), (0,), (-1,), (2**40,), (2**63, 2), (1,) * 80, (3, 2), (6,)])
        case 2:
            stype = rng.choice(["", "pickle", "torch.Tensor"])
        case _:
            data = mutated_bytes(rng, data)
    if rng.random() < 0.2:
        data = save({"a": torch.zeros(2)})
    return Array(dtype, shape, stype, data)


def mutated_reply(rng: random.Random) -> Message:
    if rng.random() < 0.02:
        error = Error(rng.choice([0, 1, 2**31 - 1]), rng.choice([None, "", "a\nb\n", "\x1b[31m" * 2000, "\x00"]))
        return Message(error, reply_to=Message(RecordDict(), 3, "train"))
    records: dict[str, Any] = {
        "upload": pack(LIKE.parameters),
        "buffers": pack(LIKE.buffers),
        "client": MetricRecord({"partition": 1, "examples": 7}),
    }
    for _ in range(rng.randint(0, 2)):
        key = rng.choice(list(records))
        match rng.randrange(6):
            case 0:
                del records[key]
            case 1:
                records[key] = rng.choice([ConfigRecord({"a": "b"}), ArrayRecord(), MetricRecord()])
            case 2:
                said = rng.choice([0, -1, 2**62, 7.5, float("nan"), [7], [], 8])
                records["client"] = MetricRecord({rng.choice(["partition", "examples", "x"]): said, "examples": 7})
            case _:
                which = rng.choice(["upload", "buffers"])
                if isinstance(records.get(which), ArrayRecord):
                    arrays = dict(records[which].items())
                    name = rng.choice(list(arrays) or ["a"])
                    if name in arrays:
                        array = arrays.pop(name) if rng.random() < 0.3 else arrays[name]
                        other = rng.choice([name, "", "a", "b", "running", "\x1b[31m", "é" * 400])
                        arrays[other] = mutated_array(rng, array)
                    records[which] = ArrayRecord(arrays)
        if not records:
            break
    return Message(RecordDict(records), 3, "train")


def test_the_upload_check() -> None:
    assume_server_identity(1)
    check = partial(read_upload, client=1, like=LIKE, allowed=Allowed(7, 10.0, True))

    def read(rng: random.Random) -> None:
        found = check(mutated_reply(rng))
        if isinstance(found, Failure):
            assert found.reason.isprintable()
            raise InputError(found.reason)
        assert isinstance(found, Upload)
        for name, value in found.state.parameters.items():
            assert value.shape == LIKE.parameters[name].shape
            assert bool(value.isfinite().all())

    fuzz(read)
