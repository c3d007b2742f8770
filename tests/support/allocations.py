"""Memory of tensors on the CPU, counted exactly: every storage that is made, and when it goes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Allocations"]


class Allocations(TorchDispatchMode):
    """Count the storages that operators of this thread make, in `present`, until they are released.

    What was there before is not counted.
    """

    def __init__(self):
        super().__init__()
        self.present = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            self._know(storage, 0)
        made = function(*args, **(kwargs or {}))
        for storage in _storages(made):
            self._know(storage, storage.nbytes())
        self.peak = max(self.peak, self.present)
        return made

    def _know(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.present += num_bytes
            weakref.finalize(storage, self._gone, storage._cdata, num_bytes)

    def _gone(self, number: int, num_bytes: int) -> None:
        self._known.discard(number)
        self.present -= num_bytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
