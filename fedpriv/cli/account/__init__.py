"""The commands ``fedpriv account MECHANISM``, ``compare`` and ``votes``: the ledger without a run."""

from fedpriv.cli.account.commands import account_app
from fedpriv.cli.account.votes import votes

__all__ = ["account_app", "votes"]
