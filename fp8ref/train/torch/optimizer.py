"""AdamW for PyTorch: torch's, torch's fused, torchao's in FP8, or fp8ref's with the moments and
masters of a layout (spec T-1, T-6)."""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fp8ref.spec.kernels import Choice
from fp8ref.torch.kernels import weights
from fp8ref.torch.states import health, states
from fp8ref.torch.tensors.local_part import local_like, local_part
from fp8ref.train.config.sections import OptimizerConfig
from fp8ref.train.run.train_state import FP8_BLOCK, MASTERS, MOMENTS, moments_in_fp8
from fp8ref.train.torch.rank_parts import gather_ranks


def build(
    params: Iterable[nn.Parameter], config: OptimizerConfig, kernels: Choice = "auto"
) -> torch.optim.Optimizer:
    """The optimizer of config.kind, with weight decay on matrices only.

    ``set_learning_rate`` sets its rate. kernels: as of ``states.AdamW``.
    """
    params = list(params)
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    if config.moment_layout is not None:
        adamw = states.AdamW(groups, betas=betas, eps=config.eps, layout=config.moment_layout)
        adamw.kernels = kernels
        return adamw
    if config.kind == "adamw_fp8":
        from torchao.optim import AdamWFp8

        return AdamWFp8(groups, betas=betas, eps=config.eps)
    return torch.optim.AdamW(
        groups,
        betas=betas,
        eps=config.eps,
        **{"fused" if config.kind == "adamw_fused" else "foreach": True},
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the rate for the next steps, in a tensor under torchao: its step is not recompiled."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer can skip a step by a flag on the device.

    Fused AdamW can: its kernel reads ``found_inf``, as torch.amp.GradScaler sets it.
    """
    return bool(optimizer.defaults.get("fused"))


def step(
    optimizer: torch.optim.Optimizer,
    finite: torch.Tensor,
    lr: float,
    measured: health.Found | None = None,
) -> None:
    """Take a step at this learning rate, or none if it ``skips`` and a device's flag is false.

    measured  filled with the health of the states of a layout that the step makes (spec O-12).
    """
    set_learning_rate(optimizer, lr)
    if skips(optimizer):
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
    if measured is not None and isinstance(optimizer, states.AdamW):
        with health.measuring(optimizer) as step_health:
            optimizer.step()
        measured |= step_health
    else:
        optimizer.step()


@torch.no_grad()
def gradients(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """The gradients of all parameters that are trained.

    One that no pass of the step used gets zeros, so that the steps of all parameters count alike
    (T-1): torch's optimizers would pass it by, and a checkpoint holds one count. One that is still
    a sum over ranks, as of norms under sequence parallelism, is summed: its norm is not that of its
    terms (T-2).
    """
    trained = [p for p in params if p.requires_grad]
    for p in trained:
        if p.grad is None:
            dtype = p.grad_dtype or p.dtype
            if isinstance(p, DTensor):
                p.grad = torch.zeros_like(p, dtype=dtype)
            else:
                p.grad = torch.zeros(p.shape, dtype=dtype, device=p.device)
        elif (
            isinstance(p.grad, DTensor)
            and isinstance(p, DTensor)
            and p.grad.placements != p.placements
        ):
            p.grad = p.grad.redistribute(placements=p.placements)
    return [p.grad for p in trained if p.grad is not None]


def rounded(p: nn.Parameter) -> torch.Tensor:
    """A float32 parameter in bfloat16, as the optimizer's kernel wrote it if it did. Its gradient
    goes to the parameter, widened."""
    left = weights.fresh(p, torch.bfloat16)
    copy = p.to(torch.bfloat16) if left is None else _Written.apply(p, left.weight)
    weights.share(copy, p)
    return copy


class _Written(torch.autograd.Function):
    """A parameter's copy in bfloat16, which is there already."""

    @staticmethod
    def forward(ctx, p: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.detach()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.float(), None


def begin(optimizer: torch.optim.Optimizer, step: int | None = None) -> None:
    """Create missing moments as the first step would, zeros; step: set the steps taken, too."""
    fused = optimizer.defaults.get("fused")
    if isinstance(optimizer, states.AdamW):
        optimizer.begin()
    for p in _parameters(optimizer):
        state = optimizer.state[p]
        if not state:
            device = p.device if fused else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state |= {
                key: _zeros_in_fp8(p)
                if _takes_fp8(optimizer, p)
                else torch.zeros_like(p, requires_grad=False)
                for key in MOMENTS
            }
        if step is not None:
            state["step"].fill_(step)


def tensors(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[nn.Parameter, str, dict[str, torch.Tensor]]]:
    """(parameter, name of the moment, what a checkpoint holds of it by suffix of its name) of all
    moments that exist, and of masters in the state."""
    if not isinstance(optimizer, states.AdamW):
        yield from ((p, key, stored(moment)) for p, key, moment in moments(optimizer))
        return
    for p in _parameters(optimizer):
        of = {MASTERS: "master"} if states.keeps_apart(optimizer.layout) else {}
        for key, prefix in (of | dict(zip(MOMENTS, ("m", "v"), strict=True))).items():
            fields = {
                field: optimizer.state[p].get(f"{prefix}_{field}")
                for field in states.MomentState._fields
            }
            present = {k: x for k, x in fields.items() if x is not None}
            yield p, key, {f".{field}": x for field, x in present.items()}


def masters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """(parameter, its float32 weight): itself, or what its master in the state is worth (O-14)."""
    for p in _parameters(optimizer):
        if not isinstance(optimizer, states.AdamW) or not states.keeps_apart(optimizer.layout):
            yield p, p.detach()
            continue
        yield p, _whole_of(states.weight(optimizer, p, torch.float32), p)


def moments(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, str, torch.Tensor]]:
    """(parameter, moment's name, moment) of all that exist, but not of ``states.AdamW``."""
    for p in _parameters(optimizer):
        yield from (
            (p, key, optimizer.state[p][key]) for key in MOMENTS if key in optimizer.state[p]
        )


def values(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, str, torch.Tensor]]:
    """(parameter, name of the moment, its float32 numbers as the next step reads them) of all."""
    if not isinstance(optimizer, states.AdamW):
        for p, key, x in moments(optimizer):
            piece = local_like(x, p)
            yield p, key, _whole_of(piece.dequantize(), p) if in_fp8(piece) else x
        return
    for p in _parameters(optimizer):
        for key, x in zip(MOMENTS, states.decode(optimizer, p), strict=True):
            yield p, key, _whole_of(x, p)


def stored(moment: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a moment that a checkpoint holds, by suffix of its name.

    "" for a moment in float32.

    An FP8 moment has codes and scales by each rank's own blocks: names hold the rank.
    """
    piece = local_part(moment)
    if not in_fp8(piece):
        return {"": moment}
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return {f".rank{rank}.codes": piece.codes.view(torch.uint8), f".rank{rank}.scale": piece.scale}  # type: ignore[attr-defined]


def in_fp8(moment: torch.Tensor) -> bool:
    """Whether a rank's piece of a moment is in FP8: torchao's codes and scales."""
    from torchao.optim.subclass_fp8 import OptimStateFp8

    return isinstance(moment, OptimStateFp8)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _takes_fp8(optimizer: torch.optim.Optimizer, p: nn.Parameter) -> bool:
    """Whether the optimizer keeps moments of this rank's piece of p in FP8 (T-6)."""
    from torchao.optim import AdamWFp8

    return isinstance(optimizer, AdamWFp8) and moments_in_fp8(local_part(p).numel())


def _zeros_in_fp8(p: nn.Parameter) -> torch.Tensor:
    from torchao.optim.subclass_fp8 import OptimStateFp8

    piece = local_part(p)
    # on the local piece, as torchao's own first step does: blocks never cross ranks
    return _whole_of(OptimStateFp8.zeros(piece.shape, FP8_BLOCK, piece.device), p)


def _whole_of(piece: torch.Tensor, p: nn.Parameter) -> torch.Tensor:
    """A tensor cut as a parameter is, of this rank's piece."""
    if not isinstance(p, DTensor):
        return piece
    return DTensor.from_local(
        piece, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


class GradientNorm:
    """The norm of all gradients of a step, the same on every rank.

    devices   the number of ranks.
    """

    def __init__(self, mesh: DeviceMesh | None, devices: int) -> None:
        self._mesh, self._devices = mesh, devices
        self._copied: tuple[tuple[int, ...], torch.Tensor] = ((), torch.empty(0))

    def __call__(self, grads: list[torch.Tensor]) -> torch.Tensor:
        """float32 (): norm of all gradients together (T-2).

        Squares are summed in float64: another sharding changes the last bit at most.
        """
        held = [g for g in grads if local_part(g).numel()]
        pieces = [local_part(g) for g in held]
        squares = torch.stack(torch._foreach_norm(pieces, 2, torch.float64)).square()
        # ranks that hold the same piece, whose squares are counted once
        copies = self._on_device(squares.device, tuple(self._copies(g) for g in held))
        return gather_ranks((squares / copies).sum(), self._mesh).sum().sqrt().float()

    def _on_device(self, device: torch.device, numbers: tuple[int, ...]) -> torch.Tensor:
        """float64 of numbers that seldom change, copied to the device where they did."""
        if self._copied[0] != numbers:
            self._copied = numbers, torch.tensor(numbers, dtype=torch.float64, device=device)
        return self._copied[1]

    def _copies(self, x: torch.Tensor) -> int:
        if not isinstance(x, DTensor):
            return 1
        cut = math.prod(
            x.device_mesh.size(i)
            for i, placement in enumerate(x.placements)
            if not placement.is_replicate()
        )
        return self._devices // cut


def check_states(optimizer: torch.optim.Optimizer) -> None:
    """Check after loading that every moment has the shape and format of this sharding (T-6).

    torch's ``load_state_dict`` accepts states of another sharding silently: the next step would be
    wrong, or keep FP8 in float32. ``Step.resume`` calls this after every load.
    Raises:   ValueError: a moment of another shape or format.
    """
    for p, key, state in moments(optimizer):
        piece = local_part(p)
        moment = local_part(state)
        expected = _takes_fp8(optimizer, p)
        if moment.shape != piece.shape or in_fp8(moment) != expected:
            formats = {True: "FP8", False: "float32"}
            raise ValueError(
                f"{key} of a parameter whose piece here is {tuple(piece.shape)} is "
                f"{formats[expected]} of that shape; got {formats[in_fp8(moment)]} "
                f"{tuple(moment.shape)}. Load states into the sharding that saved them."
            )
