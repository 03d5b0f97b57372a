"""The private pieces of Flower that our engines need, in one place; tests/engines fails when a version changes them."""

from flwr.app import Message, Metadata, RecordDict
from flwr.app.message.message import make_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity


def assume_server_identity(run_id: int) -> None:
    """Make messages created in this process those of the server of ``run_id``."""
    TaskIdentity.run_id = run_id
    TaskIdentity.node_id = SUPERLINK_NODE_ID
    TaskIdentity.task_id = run_id


def received_message(metadata: Metadata, content: RecordDict) -> Message:
    """Put a message together again whose content came by another way than its address."""
    return make_message(metadata, content)


def is_identified() -> bool:
    """Whether this process has an identity, as those have that Flower's runtimes start: it must keep that."""
    try:
        return TaskIdentity.run_id is not None
    except RuntimeError:
        return False
