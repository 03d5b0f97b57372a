"""The network listener's sentence in a run's verdict."""

from typing import ClassVar

from typing_extensions import override

from fedpriv.core.finding import Finding
from fedpriv.core.registry import FINDINGS
from fedpriv.core.runs import RunFolder
from fedpriv.deploy.notes import LISTENED, Listened, read_listened


@FINDINGS.register
class ListenerFinding(Finding[Listened]):
    """What a listener on the network passed on and stored, where a folder's observations are its."""

    name: ClassVar[str] = "listener"
    rank: ClassVar[int] = 0
    leads: ClassVar[bool] = True

    @override
    def read(self, folder: RunFolder) -> Listened | None:
        return read_listened(folder.path) if (folder.path / LISTENED).is_file() else None

    @override
    def sentences(self, found: Listened) -> tuple[str, ...]:
        return (found.verdict,)
