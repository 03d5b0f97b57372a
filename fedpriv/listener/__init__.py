"""The eavesdropper on the network: passes bytes on between SuperNodes and SuperLink, writes down what it can."""

from fedpriv.listener.notes import LISTENED, Listened, read_listened
from fedpriv.listener.relay import listen

__all__ = ["LISTENED", "Listened", "listen", "read_listened"]
