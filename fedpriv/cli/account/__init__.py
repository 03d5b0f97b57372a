"""The commands ``fedpriv account MECHANISM``, ``compare``, ``votes`` and ``response``: the ledger without a run."""

from fedpriv.cli.account.commands import account_app
from fedpriv.cli.account.response import response
from fedpriv.cli.account.votes import votes

__all__ = ["account_app", "response", "votes"]
