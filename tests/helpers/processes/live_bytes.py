"""Counts the bytes of the tensors that operators make and that are still alive."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """``now`` is the bytes of storages made within the mode and not freed; ``peak`` the most that
    they were.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # what was there before, or is a view of it, is not counted
        self._see((args, kwargs), counted=False)
        out = func(*args, **(kwargs or {}))
        self._see(out, counted=True)
        return out

    def _see(self, tree, *, counted):
        for x in torch.utils._pytree.tree_leaves(tree):
            if isinstance(x, torch.Tensor) and x.untyped_storage() not in self._known:
                storage = x.untyped_storage()
                self._known[storage] = None
                if counted:
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, size):
        self.now -= size
