"""The commands ``fedpriv account MECHANISM`` and ``fedpriv account compare``: the ledger without a run."""

from fedpriv.cli.account.commands import account_app

__all__ = ["account_app"]
