"""fp8ref's own linear layer: three GEMMs by any recipe (SEMANTICS L), for those that torchao's Float8Linear does not run."""

import functools
import importlib
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref import recipe as recipes
from fp8ref.recipe import OPERANDS, REDUCED_AXES, ROLES, CastSpec, Gemm, Recipe, Role
from fp8ref.torch import delayed, gemm, linear_input, scales, scaling
from fp8ref.torch.scaling import Quantized

Operand = torch.Tensor | Quantized
# Called with (which, a, b, out) of every FP8 GEMM, while it runs eagerly; see ``observing``.
observers: list[Callable[[Gemm, Quantized, Quantized, torch.Tensor], None]] = []


class Linear(nn.Linear):
    """An nn.Linear whose GEMMs follow a recipe: any that ``check_recipe`` takes, those with delayed scaling or scales of blocks too.

    Shapes:   x [..., K], weight [N, K] and bias [N]; output [..., N] of x's dtype. A weight of another dtype is refused, but under
              torch.autocast all are taken in its dtype, and observed so (L-7).
    Order:    leading dims flatten to M; SEMANTICS L-2, L-3, L-6; the bias is added to the rounded output (G-15, round_then_bias).
    State:    ``states[role]`` of every role with delayed scaling; read during a step, rolled by ``delayed.update``. Only where gradients
              are enabled and the module is in training mode is anything observed.
    Gradient: once; a backward pass with create_graph=True is refused (L-8).
    group     name of the process group whose ranks hold parts of one input and one grad_output: amaxes, and what ``delayed.update``
              takes, are theirs together (P-2, scope global). None: this rank's alone.
    fqn       its name in the model that was converted, for errors.
    Specials: as ``scaling.quantize`` and ``gemm.matmul``: under policy torchao a NaN or Inf makes NaN of every output that its scale reaches.
    Raises:   ValueError: a recipe that ``check_recipe`` refuses; in the forward pass another K, dtype or device than the weight's, or no rows.
    """

    fqn: str = ""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        recipe: str | Recipe,
        *,
        bias: bool = True,
        group: str | None = None,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.recipe, self.group = check_recipe(recipe), group
        self._multiply = _multiply(self.recipe, group)
        self.states = nn.ModuleDict(
            {role: delayed.RoleState(fmt, config, self.weight.device, group) for role, (fmt, config) in delayed.casts(self.recipe).items()}
        )

    @classmethod
    def of(cls, linear: nn.Linear, recipe: str | Recipe, group: str | None = None) -> "Linear":
        """An existing nn.Linear's parameters, themselves, in a Linear of this recipe. ValueError as ``check_recipe``."""
        made = cls(linear.in_features, linear.out_features, recipe, bias=False, group=group, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        for state in made.states.values():
            state.to_empty(device=linear.weight.device)
        return made.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """output [..., N] of input [..., K]; ValueError as ``linear_input.taken`` and ``linear_input.weight``."""
        x = linear_input.taken(input, self)
        w = linear_input.weight(self, x)
        observes = torch.is_grad_enabled() and self.training
        states = [self.state(role) for role in ROLES]
        if observes:
            for state, tensor in zip(states[:2], (x, w), strict=True):
                if state and not isinstance(tensor, Float8TrainingTensor):  # of such a weight its shards were seen (sharding.FP8Gather)
                    state.see(tensor)
        past = [state.scale if state else None for state in states]
        seen = states[-1].seen if observes and states[-1] else None
        y = self._multiply.apply(x, w, seen, *past)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def __getstate__(self) -> dict:
        return {key: value for key, value in vars(self).items() if key != "_multiply"}  # a class that pickle does not find

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._multiply = _multiply(self.recipe, self.group)

    def state(self, role: Role) -> delayed.RoleState | None:
        """The state of a role that is scaled by its past; None of any other."""
        if role not in self.states:
            return None
        return self.states[role]  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


@functools.cache
def _multiply(recipe: Recipe, group: str | None) -> type[torch.autograd.Function]:
    """x [..., K] by w [N, K]. A class for each recipe and group: what a compiled graph calls takes tensors and numbers only."""
    first = {"input": recipe.output.a, "weight": recipe.output.b, "grad_output": recipe.grad_input.a}
    once: dict[Role, CastSpec | None] = {
        role: first[role] if recipe.serves_both(role) else None for role in ROLES
    }  # cast once, kept as codes

    def operand(which: Gemm, role: Role, x: Operand, past: Sequence[torch.Tensor | None]) -> Operand:
        """What a GEMM takes of a role: cast along the axis that it reduces, but for what was cast already, and as it is in high precision."""
        at = OPERANDS[which].index(role)
        axis, spec = REDUCED_AXES[which][at] - 2, (recipe.gemms[which].a, recipe.gemms[which].b)[at]
        if isinstance(x, Quantized):
            return x._replace(axis=axis)
        if spec is None:
            return x
        scale = past[ROLES.index(role)]
        if scale is not None:
            return scaling.quantize_with(x, scale, spec.fmt, granularity=spec.granularity, axis=axis)
        # Ranks cut M: they share the scale of a tensor and of a row along M, and nothing of a row along K or N, of a block or of a weight (P-5).
        shared = role != "weight" and (spec.granularity == "tensorwise" or (spec.granularity == "rowwise" and axis == -2))
        over = group if shared else None
        return scaling.quantize(x, spec.fmt, granularity=spec.granularity, policy=spec.policy, axis=axis, group=over)

    def multiply(which: Gemm, operands: Sequence[Operand], dtype: torch.dtype) -> torch.Tensor:
        spec = recipe.gemms[which]
        a, b = operands
        if isinstance(a, Quantized) and isinstance(b, Quantized):
            assert spec.accumulate is not None
            out_dtype = gemm.output_dtype(spec, dtype)
            out = gemm.matmul(a, b, accumulate=spec.accumulate, epilogue=spec.epilogue, out_dtype=out_dtype).to(dtype)
            for observer in observers:
                observer(which, a, b, out)
            return out
        assert isinstance(a, torch.Tensor)
        assert isinstance(b, torch.Tensor)
        first, second = (axis - 2 for axis in REDUCED_AXES[which])
        return gemm.matmul_hp(a, b, axes=(first, second))

    def kept(q: Operand) -> tuple[torch.Tensor, ...]:
        assert isinstance(q, Quantized)
        return q.codes, q.scale, q.scale_inv

    @torch._dynamo.allow_in_graph  # AOTAutograd traces into it; dynamo alone would refuse what backward writes into seen
    class Multiply(torch.autograd.Function):
        """past: the scales, of ROLES, that a state holds; seen: where grad_output's observation is merged."""

        @staticmethod
        @linear_input.without_autocast
        def forward(ctx, x: torch.Tensor, w: torch.Tensor, seen: torch.Tensor | None, *past: torch.Tensor | None) -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1])
            a = operand("output", "input", rows, past)
            b = operand("output", "weight", _gathered(w, once["weight"]) if isinstance(w, Float8TrainingTensor) else w, past)
            ctx.save_for_backward(*(kept(a) if once["input"] else (rows,)), *(kept(b) if once["weight"] else (w,)), *past)
            ctx.seen = seen  # not saved: other uses of the layer merge into it before the backward pass
            return multiply("output", (a, b), x.dtype).reshape(*x.shape[:-1], len(w))

        @staticmethod
        @linear_input.without_autocast
        def backward(ctx, grad_output: torch.Tensor):
            if torch.is_grad_enabled():  # autograd would follow neither codes nor what makes them
                raise ValueError(
                    "gradients of a linear in FP8 are not differentiated again (L-8); got create_graph=True. Leave it out, or keep the linears "
                    "of the model in high precision by filter_fqns."
                )
            saved = iter(ctx.saved_tensors)
            of_input, of_weight = (
                Quantized(next(saved), next(saved), next(saved), spec.fmt, spec.granularity, -1) if spec else next(saved)
                for spec in (once["input"], once["weight"])
            )
            past = list(saved)
            rows = grad_output.reshape(-1, grad_output.shape[-1])
            if ctx.seen is not None:
                delayed.merge_(ctx.seen, rows)
            g: Operand = operand("grad_input", "grad_output", rows, past) if once["grad_output"] else rows
            grad_input = grad_weight = None
            if ctx.needs_input_grad[0]:
                operands = operand("grad_input", "grad_output", g, past), operand("grad_input", "weight", of_weight, past)
                grad_input = multiply("grad_input", operands, rows.dtype)
                grad_input = grad_input.reshape(*grad_output.shape[:-1], grad_input.shape[-1])
            if ctx.needs_input_grad[1]:
                operands = operand("grad_weight", "grad_output", g, past), operand("grad_weight", "input", of_input, past)
                grad_weight = multiply("grad_weight", operands, rows.dtype)
            return grad_input, grad_weight, *(None for _ in ctx.needs_input_grad[2:])

    return Multiply


def _gathered(w: Float8TrainingTensor, spec: CastSpec | None) -> Quantized:
    """A weight that came as codes and one scale."""
    assert spec is not None
    return Quantized(w._data, w._scale, w._scale.reciprocal(), spec.fmt, spec.granularity, -1)


def check_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe, if ``Linear`` runs it.

    Raises:   ValueError: operands of a GEMM whose scales cover different lengths of K; an epilogue, policy or delayed scaling that this backend
              does not implement.
    """
    recipe = recipes.by_name(recipe)
    delayed.casts(recipe)
    recipes.check_gemms(recipe, gemm.EPILOGUES, scales.implemented)
    return recipe


def __getattr__(name: str):
    if name in ("check_model", "convert", "deconvert", "weights"):  # which were here, and whose module needs this one
        return getattr(importlib.import_module("fp8ref.torch.convert"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
