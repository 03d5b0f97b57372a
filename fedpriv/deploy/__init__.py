"""A deployment on this machine: the processes that a real one has, with TLS and keys, started, followed and stopped."""

from fedpriv.deploy.containers import Admission, admit, prepare
from fedpriv.deploy.folder import DeploymentFolder, Record
from fedpriv.deploy.run import federate, for_deployment
from fedpriv.deploy.up import Status, look, restart, take_down, up

__all__ = [
    "Admission",
    "DeploymentFolder",
    "Record",
    "Status",
    "admit",
    "federate",
    "for_deployment",
    "look",
    "prepare",
    "restart",
    "take_down",
    "up",
]
