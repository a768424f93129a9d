"""Observe attention: FP8 operands where it runs eagerly (Q-13), which product is which (B-15)."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate

from fp8ref.spec.attention.products import Phase, Product, Role
from fp8ref.torch.attention.operands.heads import Heads

Watcher = Callable[[str, Phase, dict[str, Tensor]], None]
"""Called as watcher(layer, phase, tensors) after a pass, with what it made, by ``<what>/<part>`` of
``attention.products.SHOWN`` and ``PARTS``."""

Observer = Callable[[str, Product, Role, Tensor, Heads], None]
"""Called as observer(layer, product, role, x, tensor): x [B, H, T, D] and its quantized form, in
the first product that has these codes."""


Counter = Callable[[str, Product, Role, Tensor, Tensor], None]
"""Called as counter(layer, product, role, amax, counts) of P and dS: float32 (), and int64 [3], how
many elements there are, were clipped and lost, on this rank (A-12)."""


@dataclass(eq=False)
class _Observing:
    observer: Observer | None
    watcher: Watcher | None
    counter: Counter | None
    inside: list[str] = field(default_factory=list)

    def leave(self) -> None:
        """The innermost layer is done; what a hook returns would replace its output."""
        self.inside.pop()


_observing: list[_Observing] = []
_products: list[Product] = []

LABEL = "fp8ref.torch.attention"
"""The key of a product's name in a graph node's ``meta["custom"]``."""


@contextmanager
def observe_attention(
    layers: Mapping[str, nn.Module],
    observer: Observer | None,
    watcher: Watcher | None = None,
    counter: Counter | None = None,
) -> Iterator[None]:
    """In this context, report q, k, v and do of every FP8 attention that these modules compute.

    observer  None: nothing is reported, but ``layer`` is known.
    watcher   gets the matrices of both passes too, whose memory is quadratic; of attention in any
              format.
    counter   gets the amaxes and counts of P and dS.
    layers    modules by the names to report. Each computes attention at most once in a forward
              pass.
    Backward passes of what was computed here report too; checkpointing's repeated ones do not.
    """
    mine = _Observing(observer, watcher, counter)
    handles = []
    for name, module in layers.items():
        enter = lambda module, args, name=name: mine.inside.append(name)  # noqa: E731
        leave = lambda module, args, out: mine.leave()  # noqa: E731
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    _observing.append(mine)
    try:
        yield
    finally:
        _observing.remove(mine)
        for handle in handles:
            handle.remove()


def layer() -> str | None:
    """The layer that runs, if it is observed."""
    return _observing[-1].inside[-1] if _observing and _observing[-1].inside else None


@contextmanager
def inside(name: str | None) -> Iterator[None]:
    """In this context the layer runs again: its backward pass. Nothing for None."""
    if name is None or not _observing:
        yield
        return
    mine = _observing[-1]
    mine.inside.append(name)
    try:
        yield
    finally:
        mine.inside.pop()


@contextmanager
def multiplying(product: Product) -> Iterator[None]:
    """In this context one product of attention is multiplied.

    A compiler's graph has its name at each node: ``LABEL``.
    """
    compiling = torch.compiler.is_compiling()
    _products.append(product)
    try:
        with annotate({LABEL: product}) if compiling else contextlib.nullcontext():
            yield
    finally:
        _products.pop()


def product() -> Product | None:
    """The product that is multiplied now, if any."""
    return _products[-1] if _products else None


def again() -> bool:
    """Whether a backward pass runs, and a forward pass in it is a recomputed one."""
    return torch._C._current_graph_task_id() != -1


def report(name: str | None, product: Product, role: Role, x: Tensor, tensor: Heads) -> None:
    """Tell the observer; nothing if nobody observes the layer."""
    if name is not None and _observing and (observer := _observing[-1].observer) is not None:
        observer(name, product, role, x.detach(), tensor)


def counts(name: str | None) -> bool:
    """Whether anybody waits for the counts of P and dS of this layer."""
    counted = bool(_observing) and _observing[-1].counter is not None
    return (name is not None and counted) or watched(name)


def count(name: str | None, product: Product, role: Role, amax: Tensor, counts: Tensor) -> None:
    """Tell the counter; nothing if there is none."""
    if name is not None and _observing and (counter := _observing[-1].counter) is not None:
        counter(name, product, role, amax, counts)


def watched(name: str | None) -> bool:
    """Whether a watcher waits for the passes of this layer."""
    return name is not None and bool(_observing) and _observing[-1].watcher is not None


def show(
    name: str | None,
    phase: Phase,
    tensors: Mapping[str, Tensor | None],
    quantized: Mapping[str, Heads],
) -> None:
    """Tell the watcher of a pass; nothing if nobody watches.

    tensors    by ``<what>/<part>``; None: there is none.
    quantized  the same in FP8, of which scales and codes are shown.
    """
    if name is None or not _observing or (watcher := _observing[-1].watcher) is None:
        return
    shown = {key: x.detach() for key, x in tensors.items() if x is not None}
    for what, tensor in quantized.items():
        if tensor.codes.dtype.itemsize == 1:
            codes = tensor.codes.view(torch.uint8)
            shown |= {f"{what}/scale": tensor.scale, f"{what}/codes": codes}
    watcher(name, phase, shown)
