"""The commands ``fedpriv account MECHANISM``, ``compare``, ``votes``, ``response`` and ``erm``."""

from fedpriv.cli.account.commands import account_app
from fedpriv.cli.account.erm import erm
from fedpriv.cli.account.response import response
from fedpriv.cli.account.votes import votes

__all__ = ["account_app", "erm", "response", "votes"]
