"""The Flower ClientApp: answers who it is, and trains when asked."""

from functools import lru_cache

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.secure import give_shares, masked_upload, offer_keys, share_secrets
from clients.training import local_upload
from fedpriv.config import Experiment
from fedpriv.seeds import with_seed
from fedpriv.threads import cpu_threads
from fedpriv.wire import pack, unpack
from fedpriv.world import State, World, build_world

__all__ = ["app"]

app = ClientApp()


@app.query()
def identify(message: Message, context: Context) -> Message:
    """Reply with the number of the partition that this client holds."""
    return Message(RecordDict({"client": MetricRecord({"partition": _partition(context)})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one round from the parameters in the message and reply with the upload.

    The reply carries no training loss: measured on private data and sent without noise it would leak.

    Raises:
        RuntimeError: the model's code wants to end the process; this client fails, and no other.
    """
    world, upload = _trained(message, context)
    if world.experiment.federation.secure_aggregation:
        raise ValueError("the settings say that uploads are masked; this one was asked for as it is")
    reply = RecordDict({"upload": pack(upload.parameters), "buffers": pack(upload.buffers)})
    reply["client"] = _about(world, _partition(context))
    return Message(reply, reply_to=message)


@app.train("masked")
def train_masked(message: Message, context: Context) -> Message:
    """Train as :func:`train` does, and reply with an upload of which the server can read the sum only."""
    world, upload = _trained(message, context)
    reply = masked_upload(message, context, world, upload)
    reply["client"] = _about(world, _partition(context))
    return Message(reply, reply_to=message)


app.query("keys")(offer_keys)
app.query("shares")(share_secrets)
app.query("unmask")(give_shares)


def _trained(message: Message, context: Context) -> tuple[World, State]:
    """The experiment, and what this client computes in the round that the message is about."""
    task = message.content.config_records["task"]
    arrays = message.content.array_records
    before = State(unpack(arrays["parameters"]), unpack(arrays["buffers"]))
    try:
        world = _world(str(task["experiment"]), str(context.run_config.get("seed", "")))
        with cpu_threads(world.experiment.engine.threads):
            return world, local_upload(world, _partition(context), before, int(str(task["round"])))
    except SystemExit as error:
        # A model's own code must not end the process: on Ray it serves other clients, too.
        raise RuntimeError(f"the model's code raises SystemExit: {error}") from None


def _about(world: World, client: int) -> MetricRecord:
    return MetricRecord({"partition": client, "examples": len(world.partitions[client])})


def _partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


@lru_cache(maxsize=2)
def _world(text: str, seed: str) -> World:
    """Build the experiment once a process; its text is a quicker key than the object."""
    return build_world(with_seed(Experiment.model_validate_json(text), seed))
