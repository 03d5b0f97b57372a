"""The commands ``fedpriv account MECHANISM``, ``compare``, ``votes``, ``response`` and ``erm``."""

from fedpriv.core.cli.account.commands import account_app
from fedpriv.core.cli.account.erm import erm
from fedpriv.core.cli.account.response import response
from fedpriv.core.cli.account.votes import votes

__all__ = ["account_app", "erm", "response", "votes"]
