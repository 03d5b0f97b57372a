"""The commands ``fedpriv account MECHANISM``, ``compare`` and ``votes``; capabilities add theirs."""

from fedpriv.core.cli.account.commands import account_app

__all__ = ["account_app"]
