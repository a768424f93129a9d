"""A linear in a pass: what casts its operands, its three GEMMs, what it keeps (spec L-2, L-3).

``linear.Linear`` and the parts of ``blocks`` compute by it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref.recipe import REDUCED_AXES, ROLES, Gemm, Role
from fp8ref.torch import delayed
from fp8ref.torch.gemm import gemm
from fp8ref.torch.kernels import casts
from fp8ref.torch.linear import both_orders, recent_cast
from fp8ref.torch.linear.both_orders import Pair, Use
from fp8ref.torch.linear.spec import Spec
from fp8ref.torch.quantize import hadamard, scaling
from fp8ref.torch.quantize.philox import Draw
from fp8ref.torch.quantize.scaling import Quantized

__all__ = ["KEPT", "TENSORS", "Operand", "Pass", "Saved", "load", "observers", "save", "zero_row"]

KEPT = 7
"""The tensors of a weight's codes, if ``weight_codes`` has them."""

TENSORS = 2 + 3 * len(ROLES) + KEPT
"""How many tensors ``Pass.of`` takes."""

Saved = Tensor | Quantized
"""An operand as the backward pass takes it: in high precision, or quantized."""

observers: list[Callable[[Gemm, Quantized, Quantized, Tensor], None]] = []
"""Functions that are called with (which, a, b, out) of every FP8 GEMM that runs eagerly.

``observe.gemms`` adds and removes them.
"""


class Operand(NamedTuple):
    """A role's tensor, hp or quantized, and the scale of its state (None if by its own amax).

    columns   the tensor reduced along its first axis, where kernels cast it once for both GEMMs.
    """

    role: Role
    tensor: Saved
    scale: Tensor | None = None
    columns: Quantized | None = None

    def cast(self, use: Use, draw: Draw | None = None) -> Saved:
        """The tensor as a GEMM takes it: rotated and cast along its reduced axis, or in high
        precision.

        Codes cast once for both GEMMs only change their reduced axis: one scale serves both.
        """
        x, spec = self.tensor, use.cast
        if self.columns is not None and use.axis == self.columns.axis:
            return self.columns
        if isinstance(x, Quantized):
            return x if x.axis == use.axis else x._replace(axis=use.axis)
        if spec is None:
            return x
        if spec.rotation is not None:
            x = hadamard.rotate_blocks(x, spec.rotation, use.axis)
        if self.scale is not None:
            return scaling.quantize_with(
                x, self.scale, spec.fmt, granularity=spec.granularity, axis=use.axis, draw=draw
            )
        return scaling.quantize(
            x,
            spec.fmt,
            granularity=spec.granularity,
            policy=spec.policy,
            axis=use.axis,
            group=use.group,
            ragged=use.ragged,
            draw=draw,
        )


class Pass(NamedTuple):
    """A linear in a pass.

    seen, scales, guesses
              of each of ROLES: the observation of its state in this pass, float32 [3], its scale,
              and a guess of its scale; or None.
    weight    [N, K], in high precision or gathered as codes; in the backward pass as ``output``
              saved it, and so is input.
    kept      the tensors of ``WeightCodes``, if the weight was cast once for several passes.
    keys      the seeds of its GEMMs in this pass (``rounding``), int64 [3, 2], or None.
    """

    spec: Spec
    seen: Sequence[Tensor | None]
    scales: Sequence[Tensor | None]
    guesses: Sequence[Tensor | None] = (None, None, None)
    weight: Any = None
    kept: Sequence[Any] = ()
    input: Any = None
    keys: Tensor | None = None

    @classmethod
    def of(cls, spec: Spec, tensors: Sequence[Tensor | None]) -> "Pass":
        """From its TENSORS: weight, keys, seen, scales, guesses, and kept, of which all may be
        None."""
        weight, keys, *states = tensors
        kept = () if states[9] is None else states[9:]
        return cls(spec, states[:3], states[3:6], states[6:9], weight, kept, keys=keys)

    def operand(self, role: Role, x: Tensor, whole: Tensor | None = None) -> Operand:
        """A role's tensor, observed; cast if both GEMMs take its codes, or kernels cast for both.

        whole     the tensor that x is a view of, which other linears may read too.
        """
        place = ROLES.index(role)
        seen, scale, guess = self.seen[place], self.scales[place], self.guesses[place]
        if self.spec.by_kernels(role, x.device):
            uses = self.spec.pairs[role]
            if whole is None:
                return self.observed(role, both_orders.quantize(x, uses, scale, guess=guess))
            return self.observed(role, recent_cast.quantize(whole, x, uses, scale, guess))
        if seen is not None:
            delayed.merge_(seen, x)
        operand = Operand(role, x, scale)
        if self.spec.cast_once[role] is None:
            return operand
        return Operand(role, operand.cast(self.spec.role_uses[role][0]), scale)

    def observed(self, role: Role, pair: Pair) -> Operand:
        """What kernels cast for both GEMMs of a role, observed."""
        if (seen := self.seen[ROLES.index(role)]) is not None:
            assert pair.parts is not None
            casts.merge_(seen, pair.parts)
        return Operand(role, pair.rows, columns=pair.columns)

    def output(
        self, x: Operand, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Saved | None, Saved]]:
        """The output [..., N] of an input [M, K] that had this shape [..., K]; what the backward
        pass takes: the input, None unless it was cast for it, and the weight."""
        spec, weight = self.spec, self._weight()
        a, b = (self._cast("output", each) for each in (x, weight))
        y = self._multiply("output", a, b, dtype)  # [M, K] @ [K, N] -> [M, N]
        saved = x.columns or (a if spec.cast_once["input"] else None)
        # A reshape is a view, and autograd refuses to change a Function's view in place.
        y = torch.ops.aten._unsafe_view(y, (*shape[:-1], y.shape[-1]))
        return y, (saved, self._saved_weight(weight, b))

    def _weight(self) -> Operand:
        """The weight, observed, from where it is."""
        w, spec = self.weight, self.spec
        if isinstance(w, Float8TrainingTensor):  # FSDP2 gathered it as codes with one scale
            cast = spec.cast_once["weight"]
            assert cast is not None
            inverse = w._scale.reciprocal()
            return Operand(
                "weight", Quantized(w._data, w._scale, inverse, cast.fmt, cast.granularity, -1)
            )
        if self.kept:
            *codes, parts = self.kept
            cast = spec.pairs["weight"][0].cast
            assert cast is not None
            return self.observed("weight", both_orders.pair(cast, codes, parts))
        return self.operand("weight", w)

    def _saved_weight(self, weight: Operand, b: Saved) -> Saved:
        w, spec = self.weight, self.spec
        if weight.columns is not None and not spec.sharded:
            return weight.columns
        if spec.cast_once["weight"] is None:
            return w
        assert isinstance(b, Quantized)
        # Codes of a weight that FSDP2 gathered are a view of its buffer, which it fills again
        # before the backward pass. Others would be memory of their own: the weight is kept, which a
        # model or FSDP2 has anyway, and cast again by the same scale.
        recasts = not spec.autocast and not isinstance(w, Float8TrainingTensor)
        return b._replace(codes=w if recasts else b.codes, transposed=None)

    def grad_input(self, g: Operand, dtype: torch.dtype) -> Tensor:
        """[M, N] @ [N, K] -> [M, K]."""
        return self._gradient(
            "grad_input", g, Operand("weight", self._columns(), self.scales[1]), dtype
        )

    def grad_weight(self, g: Operand, x: Saved, dtype: torch.dtype) -> Tensor:
        """[N, M] @ [M, K] -> [N, K]; x: the input as it was saved, or itself."""
        return self._gradient("grad_weight", g, Operand("input", x, self.scales[0]), dtype)

    def _gradient(self, which: Gemm, g: Operand, other: Operand, dtype: torch.dtype) -> Tensor:
        a, b = (self._cast(which, each) for each in (g, other))
        return self._multiply(which, a, b, dtype)

    def _cast(self, which: Gemm, operand: Operand) -> Saved:
        """An operand as a GEMM takes it."""
        draw = self.spec.draw(which, operand.role, operand.tensor, self.keys)
        return operand.cast(self.spec.uses[which, operand.role], draw)

    def _columns(self) -> Saved:
        """The saved weight for grad_input: cast again by its scale, if it was kept uncast, and
        transposed where kernels do that."""
        w = self.weight
        if not isinstance(w, Quantized):
            return w
        is_cast = w.codes.dtype.itemsize == 1
        if w.transposed is None and self.spec.by_kernels("weight", w.codes.device):
            if is_cast:
                return w._replace(transposed=casts.transpose(w.codes))
            codes, transposed, _ = casts.cast(w.codes, w.scale, e5m2=w.fmt.name == "e5m2")
            return w._replace(codes=codes, transposed=transposed)
        return w if is_cast else scaling.requantize(w.codes, w)

    def _multiply(self, which: Gemm, a: Saved, b: Saved, dtype: torch.dtype) -> Tensor:
        """Multiply a and b along the GEMM's reduced axes; the result is in dtype."""
        spec = self.spec.recipe.gemms[which]
        if isinstance(a, Quantized) and isinstance(b, Quantized):
            assert spec.accumulate is not None
            out_dtype = gemm.output_dtype(spec, dtype)
            is_unit = spec.epilogue == "unit_round_scale_round"
            out = gemm.matmul(
                a,
                b,
                accumulate=spec.accumulate,
                epilogue=spec.epilogue,
                out_dtype=out_dtype,
                kernels=is_unit and self.spec.runs_kernels(a.codes.device),
            ).to(dtype)
            for observer in observers:
                observer(which, a, b, out)
            return out
        # One operand beside another in high precision: its numbers, in that one's dtype (L-4).
        a, b = (scaling.dequantize(v).to(dtype) if isinstance(v, Quantized) else v for v in (a, b))
        first, second = (axis - 2 for axis in REDUCED_AXES[which])
        return gemm.matmul_hp(a, b, axes=(first, second))


def zero_row(x: Tensor, rows: int = 1) -> Tensor:
    """An x [..., K] without rows as [1, K], a row of zeros, or several."""
    return torch.cat([x.reshape(0, x.shape[-1]), x.new_zeros(rows, x.shape[-1])])


def save(
    ctx,
    linears: Sequence[Pass],
    saved: Sequence[tuple[Saved | None, Saved]],
    others: Sequence[Tensor | None] = (),
) -> None:
    """Save what each linear's ``output`` returned for the backward pass, and other tensors."""
    # Attributes, not saved tensors, which autograd refuses where other uses write observations.
    ctx.seen = [each.seen for each in linears]
    operands = [x for pair in saved for x in pair]
    ctx.forms = [
        (*x[3:6], x.transposed is not None) if isinstance(x, Quantized) else None for x in operands
    ]
    tensors = [x for operand in operands for x in _tensors(operand)]
    scales = (scale for each in linears for scale in each.scales)
    ctx.save_for_backward(*tensors, *scales, *(each.keys for each in linears), *others)


def _tensors(x: Saved | None) -> tuple[Tensor | None, ...]:
    """An operand's tensors: of codes that are there in both orders the transposed ones."""
    if isinstance(x, Quantized):
        return x.codes if x.transposed is None else x.transposed, x.scale, x.scale_inv
    return x, None, None


def load(ctx, specs: Sequence[Spec]) -> tuple[list[Pass], Sequence[Any]]:
    """The linears and other tensors that ``save`` saved.

    ValueError if autograd follows the backward pass: it can differentiate no codes (L-8).
    """
    if torch.is_grad_enabled():
        raise ValueError(
            "gradients of a linear in FP8 are not differentiated again; got create_graph=True. "
            "Leave it out, or keep the linears in high precision with filter_fqns (L-8)."
        )
    tensors, n = ctx.saved_tensors, len(specs)
    operands = [_operand(form, *tensors[3 * i : 3 * i + 3]) for i, form in enumerate(ctx.forms)]
    linears = [
        Pass(
            spec,
            ctx.seen[i],
            tensors[6 * n + 3 * i : 6 * n + 3 * i + 3],
            input=operands[2 * i],
            weight=operands[2 * i + 1],
            keys=tensors[9 * n + i],
        )
        for i, spec in enumerate(specs)
    ]
    return linears, tensors[10 * n :]


def _operand(form: tuple | None, codes: Any, scale: Any, scale_inv: Any) -> Saved | None:
    """The operand of ``_tensors``."""
    if form is None:
        return codes
    fmt, granularity, axis, is_transposed = form
    rows, transposed = (codes.t(), codes) if is_transposed else (codes, None)
    return Quantized(rows, scale, scale_inv, fmt, granularity, axis, transposed)
