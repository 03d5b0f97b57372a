"""Runs that are watched for memory and file handles that grow."""

import gc
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from fedpriv.core.config import Experiment
from fedpriv.core.lab import start_run
from fedpriv.core.progress import Silent
from fedpriv.core.records import RoundRecord

__all__ = ["Usage", "watched_run"]

MIB = 1 << 20


@dataclass
class Usage(Silent):
    """Fifty times in a run: MiB that this process and its children hold, and the files and sockets that are open.

    Memory is what the processes have for themselves (USS), so that what they share is not counted twice.
    """

    memory: list[float] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)

    def round_finished(self, record: RoundRecord, rounds: int) -> None:
        if record.round % max(1, rounds // 50):
            return
        gc.collect()
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        self.memory.append(sum(one.memory_full_info().uss for one in family) / MIB)
        self.handles.append(sum(one.num_fds() for one in family))

    def growth(self, begin: int) -> float:
        """How much more memory was held at most after look ``begin`` than then, as a share."""
        return max(self.memory[begin:]) / self.memory[begin - 1] - 1


def watched_run(settings: Experiment, folder: Path) -> Usage:
    """Run an experiment and return what it held."""
    usage = Usage()
    assert start_run(settings, folder, "", usage).status == "completed"
    return usage
