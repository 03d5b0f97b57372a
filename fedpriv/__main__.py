"""``python -m fedpriv`` is ``fedpriv``."""

from fedpriv.core.cli import main

if __name__ == "__main__":
    main()
