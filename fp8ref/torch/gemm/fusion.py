"""Keep casts that transpose out of inductor's reductions, which would write a sector for each code.

GEMMs of gradients take codes transposed. Inductor fuses such a cast with a reduction that reads the
same tensor, an RMSNorm's backward pass or an amax: the lanes of that kernel run along the tensor's
rows and store the codes of a row in as many rows, one byte in each. A GPU writes 32 bytes for each.
On an H100 one such kernel took 20 to 30 times what its bytes need. As a kernel of its own the cast
is tiled, and reads and writes whole sectors.

``convert`` calls ``install``, for models that are not on a CPU; torchao's linears profit alike.
Which kernels there are changes, and no bit of what they compute under ``emulate_precision_casts``.
"""

import torch
from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.dependencies import MemoryDep
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
from torch._inductor.utils import sympy_subs
from torch._inductor.virtualized import V


class Choices(InductorChoices):
    """Inductor's choices of what it fuses, but for codes that are written transposed."""

    @staticmethod
    def can_fuse(
        scheduler: Scheduler,
        node1: BaseSchedulerNode,
        node2: BaseSchedulerNode,
        shared_data_score: int,
    ) -> bool:
        """Whether two nodes may be one kernel: not a reduction with a cast that transposes."""
        if (node1.is_reduction() and transposes(node2)) or (
            node2.is_reduction() and transposes(node1)
        ):
            return False
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score)

    def uuid(self) -> str:
        """What caches of compiled graphs know these choices by."""
        return f"{__name__}.{type(self).__name__} 1"


def install() -> None:
    """Have inductor fuse by ``Choices`` in this process, unless the user has set other choices.

    Sets:     torch._inductor.config.inductor_choices_class, which threads read when they first
              compile, and the choices of this thread.
    """
    if config.inductor_choices_class is None and type(V.choices) is InductorChoices:
        config.inductor_choices_class = Choices
        V.set_choices_handler(Choices())


def transposes(node: BaseSchedulerNode) -> bool:
    """Whether a node, or one that was fused into it, stores elements of a byte along another axis
    than it loads along; not on a CPU."""
    device = node.get_device()
    return (
        device is not None
        and device.type != "cpu"
        and any(not one.is_reduction() and _transposes(one) for one in node.get_nodes())
    )


def _transposes(node: BaseSchedulerNode) -> bool:
    stored = [
        dep for dep in node.read_writes.writes if isinstance(dep, MemoryDep) and _is_byte(dep.name)
    ]
    loaded = [dep for dep in node.read_writes.reads if isinstance(dep, MemoryDep)]
    along = [{_is_contiguous(dep) for dep in deps if _spans(dep)} for deps in (stored, loaded)]
    return any(one != other for one in along[0] for other in along[1])


def _is_byte(buffer: str) -> bool:
    dtype = V.graph.get_dtype(buffer)
    return dtype.itemsize == 1 and dtype != torch.bool


def _is_contiguous(dep: MemoryDep) -> bool:
    """Whether the innermost loop walks along memory.

    Its first step tells, also where loops were joined and the index divides.
    """
    start = dict.fromkeys(dep.var_names, 0)
    innermost = next(
        name
        for name, size in zip(reversed(dep.var_names), reversed(dep.size), strict=True)
        if size != 1
    )
    return sympy_subs(dep.index, start | {innermost: 1}) - sympy_subs(dep.index, start) == 1


def _spans(dep: MemoryDep) -> bool:
    """Whether an access has an element for each pass of at least two loops: scales, and what one
    loop walks through, have no direction."""
    loops = {name for name, size in zip(dep.var_names, dep.size, strict=True) if size != 1}
    return len(loops) > 1 and loops <= dep.index.free_symbols
