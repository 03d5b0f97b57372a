"""The Flower ClientApp: answers who it is, and trains when asked."""

from functools import lru_cache

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

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
    task = message.content.config_records["task"]
    client = _partition(context)
    arrays = message.content.array_records
    before = State(unpack(arrays["parameters"]), unpack(arrays["buffers"]))
    try:
        world = _world(str(task["experiment"]), str(context.run_config.get("seed", "")))
        with cpu_threads(world.experiment.engine.threads):
            upload = local_upload(world, client, before, int(str(task["round"])))
    except SystemExit as error:
        # A model's own code must not end the process: on Ray it serves other clients, too.
        raise RuntimeError(f"the model's code raises SystemExit: {error}") from None
    reply = RecordDict(
        {
            "upload": pack(upload.parameters),
            "buffers": pack(upload.buffers),
            "client": MetricRecord({"partition": client, "examples": len(world.partitions[client])}),
        }
    )
    return Message(reply, reply_to=message)


def _partition(context: Context) -> int:
    return int(context.node_config["partition-id"])


@lru_cache(maxsize=2)
def _world(text: str, seed: str) -> World:
    """Build the experiment once a process; its text is a quicker key than the object."""
    return build_world(with_seed(Experiment.model_validate_json(text), seed))
