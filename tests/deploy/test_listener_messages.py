"""Messages put together again from Flower's own requests: in any order of objects, and only if whole."""

import json
import random
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedpriv.attacks.observation import read_observation
from fedpriv.core.config import Experiment
from fedpriv.core.seeds import without_seed
from fedpriv.core.wire import pack
from fedpriv.deploy.messages import Exchange, Messages, Spoken
from fedpriv.deploy.relay import Follower
from fedpriv.deploy.report import Listened, read_listened

RUN, NODE = 4711, 99
SETTINGS = {
    "name": "heard",
    "model": {"name": "mlp", "hidden": [4]},
    "federation": {"clients": 2},
    "training": {"batch_size": 1},
}


def experiment(**changes: object) -> Experiment:
    return without_seed(Experiment.model_validate({**SETTINGS, **changes}))


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"0.weight": (4, 64), "0.bias": (4,), "2.weight": (10, 4), "2.bias": (10,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def message(content: RecordDict, number: str, reply_to: str) -> Message:
    nodes = (NODE, 1) if reply_to else (1, NODE)
    about = Metadata(RUN, number, *nodes, reply_to, "1", 0.0, 3600.0, "train")
    return Message(metadata=about, content=content)


def exchange(told: Experiment, seed: int = 0) -> tuple[Message, Message]:
    task = ConfigRecord({"experiment": told.model_dump_json(), "round": 1})
    question = RecordDict({"parameters": pack(tensors(seed)), "buffers": pack({}), "task": task})
    about = MetricRecord({"partition": 1, "examples": 700})
    answer = RecordDict({"upload": pack(tensors(seed + 1)), "buffers": pack({}), "client": about})
    return message(question, f"q{seed}", ""), message(answer, f"a{seed}", f"q{seed}")


def announced(one: Message) -> tuple[object, object]:
    bare = Message(metadata=one.metadata, content=RecordDict())
    return message_to_proto(bare), get_object_tree(one)


def asked(one: Message) -> list[Spoken]:
    proto, tree = announced(one)
    reply = PullMessagesResponse(messages_list=[proto], message_object_trees=[tree]).SerializeToString()
    spoken = [Spoken("/v1/fleet/pull-messages", b"", 200, reply)]
    for name, each in get_all_nested_objects(one).items():
        request = PullObjectRequest(node=Node(node_id=NODE), run_id=RUN, object_id=name)
        reply = PullObjectResponse(object_found=True, object_available=True, object_content=each.deflate())
        spoken.append(Spoken("/v1/fleet/pull-object", request.SerializeToString(), 200, reply.SerializeToString()))
    return spoken


def answered(one: Message, leave_out: set[str] = frozenset()) -> list[Spoken]:
    proto, tree = announced(one)
    request = PushMessagesRequest(node=Node(node_id=NODE), messages_list=[proto], message_object_trees=[tree])
    spoken = [Spoken("/v1/fleet/push-messages", request.SerializeToString(), 200, b"")]
    for name, each in get_all_nested_objects(one).items():
        if name not in leave_out:
            pushed = PushObjectRequest(
                node=Node(node_id=NODE), run_id=RUN, object_id=name, object_content=each.deflate()
            )
            spoken.append(Spoken("/v1/fleet/push-object", pushed.SerializeToString(), 200, b""))
    return spoken


@pytest.mark.parametrize("seed", range(5))
def test_objects_in_any_order_make_the_message(seed: int) -> None:
    question, answer = exchange(experiment(), seed)
    down, up = asked(question), answered(answer)
    random.Random(seed).shuffle(down)
    up[1:] = random.Random(seed).sample(up[1:], len(up) - 1)
    messages = Messages()
    found = [each for spoken in (*down, *up) for each in messages.hear(spoken)]
    (one,) = found
    assert (one.run_id, one.kind) == (RUN, "train")
    assert one.question == question.content
    assert one.answer == answer.content


def test_what_flower_leaves_out_because_the_other_end_has_it_is_remembered() -> None:
    question, answer = exchange(experiment())
    shared = get_all_nested_objects(question).keys() & get_all_nested_objects(answer).keys()
    assert shared  # the empty record of buffers
    messages = Messages()
    found = [each for spoken in (*asked(question), *answered(answer, shared)) for each in messages.hear(spoken)]
    assert [each.answer for each in found] == [answer.content]


def test_an_answer_without_one_of_its_arrays_is_no_answer() -> None:
    question, answer = exchange(experiment())
    names = [name for name, each in get_all_nested_objects(answer).items() if len(each.deflate()) > 500]
    messages = Messages()
    spoken = (*asked(question), *answered(answer, {names[0]}))
    assert not [each for one in spoken for each in messages.hear(one)]


def test_nothing_heavy_is_kept_after_an_exchange() -> None:
    messages = Messages()
    for seed in range(3):
        for spoken in (*asked((pair := exchange(experiment(), seed))[0]), *answered(pair[1])):
            messages.hear(spoken)
        assert not messages._nodes[NODE].objects
        assert not messages._nodes[NODE].questions


def test_an_upload_becomes_an_observation_with_what_is_public(tmp_path: Path) -> None:
    question, answer = exchange(experiment(mechanism={"name": "gaussian", "sigma": 2.0, "clip_norm": 0.5}))
    notes = Follower(tmp_path, Listened("here", "there", {}))
    messages = Messages()
    for spoken in (*asked(question), *answered(answer)):
        for one in messages.hear(spoken):
            notes.note(one)
    assert (notes.listened.exchanges, notes.listened.uploads, notes.listened.unread) == (1, 1, ())
    found = read_observation(tmp_path / f"run-{RUN}" / "observations" / "0001-0001.safetensors")
    for name, value in tensors(0).items():
        assert torch.equal(found.parameters[name], value)
    for name, value in tensors(1).items():
        assert torch.equal(found.upload[name], value)
    settings = found.settings
    assert (settings.shape, settings.classes, settings.batch_size) == ((1, 8, 8), 10, 1)
    assert (settings.client_examples, settings.local_steps) == (700, 1)
    assert (settings.mechanism["sigma"], settings.mechanism["clip_norm"]) == (2.0, 0.5)
    assert "seed" not in json.dumps(json.loads((tmp_path / f"run-{RUN}" / "experiment.json").read_text())["model"])


@pytest.mark.parametrize(("kind", "unread"), [("query", 0), ("query.keys", 0), ("train.masked", 1)])
def test_what_is_no_upload_in_the_clear_is_not_stored(kind: str, unread: int, tmp_path: Path) -> None:
    question, answer = exchange(experiment())
    notes = Follower(tmp_path, Listened("here", "there", {"http": 1}))
    notes.note(Exchange(RUN, kind, question.content, answer.content))
    assert (notes.listened.exchanges, notes.listened.uploads, len(notes.listened.unread)) == (1, 0, unread)
    assert "stored no upload" in notes.listened.verdict
    assert not list(tmp_path.glob("run-*"))


def bad_round(question: Message, answer: Message) -> None:
    question.content.config_records["task"]["round"] = "one"


def no_upload(question: Message, answer: Message) -> None:
    del answer.content["upload"]


def other_shape(question: Message, answer: Message) -> None:
    answer.content["upload"] = pack({**tensors(1), "2.bias": torch.zeros(9)})


def no_experiment(question: Message, answer: Message) -> None:
    question.content.config_records["task"]["experiment"] = "{}}"


@pytest.mark.parametrize("spoil", [bad_round, no_upload, other_shape, no_experiment])
def test_what_does_not_fit_is_named_and_left_out(spoil, tmp_path: Path) -> None:
    question, answer = exchange(experiment())
    spoil(question, answer)
    follower = Follower(tmp_path, Listened("here", "there", {}))
    for spoken in (*asked(question), *answered(answer)):
        follower._hear(spoken)
    assert follower.listened.uploads == 0
    assert len(follower.listened.unread) == 1
    assert not list(tmp_path.glob("run-*"))


def test_an_object_under_a_wrong_name_is_refused(tmp_path: Path) -> None:
    pushed = PushObjectRequest(node=Node(node_id=NODE), run_id=RUN, object_id="0" * 64, object_content=b"Array,,0\x00")
    follower = Follower(tmp_path, Listened("here", "there", {}))
    follower._hear(Spoken("/v1/fleet/push-object", pushed.SerializeToString(), 200, b""))
    assert "does not have the name" in follower.listened.unread[0]


def test_mutated_traffic_stops_nothing(tmp_path: Path) -> None:
    question, answer = exchange(experiment())
    for seed in range(50):
        folder = tmp_path / str(seed)
        folder.mkdir()
        stream, follower = random.Random(seed), Follower(folder, Listened("here", "there", {}))
        for spoken in (*asked(question), *answered(answer)):
            body = bytearray(spoken.request or spoken.reply)
            for _ in range(stream.randint(0, 3)):
                body[stream.randrange(len(body))] = stream.randrange(256)
            cut = bytes(body[: stream.randint(len(body) // 2, len(body) * 2)])
            follower._hear(
                Spoken(spoken.path, cut if spoken.request else b"", 200, spoken.reply if spoken.request else cut)
            )
        follower.write()
        assert read_listened(folder).unread == follower.listened.unread, seed
