"""fedpriv: a crash-test lab for federated learning."""

from importlib.metadata import version
from pathlib import Path

__version__ = version("fedpriv")

# In a repository the rooms clients, server and attacks lie beside this folder, and links in it lead to them. Flower's
# packed app and a checkout without links lack those: there the rooms are found where they lie.
_HERE = Path(__file__).resolve().parent
if not (_HERE / "clients").is_dir():
    __path__.append(str(_HERE.parent))
