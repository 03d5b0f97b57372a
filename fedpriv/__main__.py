"""``python -m fedpriv`` is ``fedpriv``."""

from fedpriv.cli import main

if __name__ == "__main__":
    main()
