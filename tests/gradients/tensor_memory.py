"""What tensors take while code runs: the bytes of all storages that are alive at once, seen from below autograd."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Counts storages that are made inside the block and not yet let go; what kernels take for themselves is not seen.

    Attributes:
        live: bytes now.
        peak: the most there were.
        largest: of one storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(value.untyped_storage()) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        made = func(*args, **(kwargs or {}))
        for value in tree_leaves(made):
            if isinstance(value, Tensor) and id(value.untyped_storage()) not in given | self._known:
                self._count(value)
        return made

    def _count(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        key, size = id(storage), storage.nbytes()
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, size)
        weakref.finalize(storage, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
