"""fp8ref's own linear layer: three GEMMs by any recipe (spec L).

``convert`` puts it in a model where Triton kernels cast, where ranks share amaxes (the trainer's
default), and for recipes that torchao's Float8Linear cannot express: delayed scaling, block scales.
Otherwise it takes torchao's, whose three GEMMs are in torchao.float8.float8_linear.

Of an input x [M, K], a weight w [N, K] and a grad_output g [M, N], each cast to FP8 as the recipe
says:

    output      = x @ w.T    [M, K] @ [K, N] -> [M, N]
    grad_input  = g @ w      [M, N] @ [N, K] -> [M, K]
    grad_weight = g.T @ x    [N, M] @ [M, K] -> [N, K]

``_forward`` and ``_backward`` compute them, from operands that ``_Operand.cast`` casts for each
GEMM, or ``both_orders.quantize`` for both at once, where kernels cast. Results have x's dtype.
FSDP2 averages grad_weight over ranks afterwards, in the reduce_dtype of ``Parallelism``.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref import recipe as recipes
from fp8ref.recipe import OPERANDS, REDUCED_AXES, ROLES, CastSpec, Gemm, Recipe, Role
from fp8ref.spec.kernels import Choice
from fp8ref.spec.kernels import check as check_kernels
from fp8ref.torch.delayed import delayed
from fp8ref.torch.delayed import state_checks as delayed_checks
from fp8ref.torch.gemm import gemm
from fp8ref.torch.kernels import casts, choice
from fp8ref.torch.linear import both_orders, recent_cast
from fp8ref.torch.linear.both_orders import Use
from fp8ref.torch.linear.cut import Cut, check_part, writable
from fp8ref.torch.linear.weight_codes import WeightCodes
from fp8ref.torch.quantize import scaling
from fp8ref.torch.quantize.scaling import Groups, Quantized
from fp8ref.torch.tensors import linear_input

__all__ = ["Linear", "casts_by_kernels", "check_recipe", "observers", "roles_by_kernels"]

Operand = torch.Tensor | Quantized
"""An operand of a GEMM: in high precision, or quantized."""

observers: list[Callable[[Gemm, Quantized, Quantized, torch.Tensor], None]] = []
"""Functions that are called with (which, a, b, out) of every FP8 GEMM that runs eagerly.

``observe.gemms`` adds and removes them.
"""


class Linear(nn.Linear):
    """An nn.Linear whose GEMMs follow a recipe, delayed scaling and block scales included.

    Shapes:   x [..., K], weight [N, K] and bias [N]; output [..., N] of x's dtype. The weight has
              x's dtype; under torch.autocast both are cast to its dtype, and amaxes are observed in
              it (L-7).
    Order:    leading dims flatten to M; spec L-2, L-3, L-6; the bias is added to the rounded
              output (G-15, round_then_bias).
    State:    ``states[role]`` of every role with delayed scaling; read during a step, rolled by
              ``delayed.update``. Amaxes are observed only if gradients are enabled and the module
              is in training mode. An optimizer step without ``delayed.update`` is warned of in the
              next such pass, and refused after delayed_checks.MOST (H-12).
    Gradient: once; a backward pass with create_graph=True is refused (L-8).
    Empty:    no tokens give no outputs, and gradients of zeros; nothing is observed (L-9).
    input_guess, weight_guess
              of a role that is scaled by one power of two: the bits of its last scale, int32, by
              which kernels cast while they take the amax (R-1). No bit depends on them, and no
              checkpoint has them.
    kernels   what casts: Triton kernels where they run ("auto"), or as asked for; the same bits.
    group     name of the process group whose ranks hold parts of one input and one grad_output, and
              share their amaxes and what ``delayed.update`` takes (P-2, scope global). None: this
              rank alone.
    kept      the weight's codes in both orders, which ``cast_once.cast_once`` made; None: each pass
              casts it.
    cut       how tensor-parallel ranks share the linear (``tensor_parallel``); None if they do not.
    fqn       its name in the model that was converted, for errors.
    Specials: as ``scaling.quantize`` and ``gemm.matmul``: under policy torchao a NaN or Inf makes
              NaN of every output that its scale reaches.
    Raises:   ValueError: a recipe that ``check_recipe`` refuses; in the forward pass an input of
              another K, dtype or device than the weight's.
    """

    fqn: str = ""
    kernels: Choice = "auto"
    kept: WeightCodes | None
    input_guess: torch.Tensor | None
    weight_guess: torch.Tensor | None

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
        self.cut: Cut | None = None
        self.kept = None
        self.groups = Groups(batch=group, every=group)
        self._bind()
        for role in ROLES[:2]:
            guessed = role in self.spec.pairs and both_orders.is_guessed(self.spec.pairs[role])
            bits = torch.zeros((), dtype=torch.int32, device=self.weight.device)
            self.register_buffer(f"{role}_guess", bits if guessed else None, persistent=False)
        casts = delayed.casts(self.recipe)
        self.states = delayed.role_states(casts, self.weight.device, group)
        delayed_checks.watch(self)

    @classmethod
    def of(
        cls,
        linear: nn.Linear,
        recipe: str | Recipe,
        group: str | None = None,
        kernels: Choice = "auto",
    ) -> "Linear":
        """A Linear of this recipe with the Parameters of an existing nn.Linear.

        ValueError as ``check_recipe`` and ``spec.kernels.check``.
        """
        check_kernels(kernels)
        converted = cls(
            linear.in_features, linear.out_features, recipe, bias=False, group=group, device="meta"
        )
        converted.weight, converted.bias = linear.weight, linear.bias
        converted.kernels = kernels
        converted._bind()
        for state in converted.states.values():
            state.to_empty(device=linear.weight.device)
        for key, guess in converted.named_buffers(recurse=False):
            setattr(converted, key, torch.zeros_like(guess, device=linear.weight.device))
        return converted.train(linear.training)

    @linear_input.weight_once
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """output [..., N] of input [..., K]. ValueError as in linear_input."""
        x = linear_input.checked_input(input if self.cut is None else self.cut.enter(input), self)
        w = linear_input.weight(self, x)
        observes = x.numel() > 0 and delayed.observes(self)
        states = [self.state(role) for role in ROLES]
        delayed_checks.check_pass(self, self.states, x, observes)
        delayed_scales = [state.scale if state else None for state in states]
        seen = [state.seen if observes and state else None for state in states]
        if isinstance(w, Float8TrainingTensor):
            seen[1] = None  # fp8_gather.FP8Gather has observed this rank's shard already
        function = self._function_under_autocast
        if w.dtype == self.weight.dtype:
            function = self._function_sharded if is_sharded(self) else self._function
        if delayed.calibrating():
            for state, tensor in zip(states[:2], (x, w), strict=True):
                if state and not isinstance(tensor, Float8TrainingTensor):
                    state.observe(tensor)
            y = linear_input.calibrated(x, w, self.fqn)
        elif x.numel() == 0:
            y = self._empty_output(function, x, w, delayed_scales)
        else:
            kept = () if self.kept is None else self.kept.serving(w, self.fqn)
            y = function.apply(x, w, *seen, *delayed_scales, *self.guesses(x.device), *kept)
        bias: torch.Tensor | None = self.bias
        if self.cut is not None:
            y, bias = self.cut.leave(y), None if bias is None else self.cut.bias(bias)
        return y if bias is None else y + bias.to(y.dtype)

    def guesses(self, device: torch.device) -> list[torch.Tensor | None]:
        """A guess for each of ROLES, on a device. A compiler takes an input's amax in the kernel
        that makes it, and casts what linears share once: inputs of compiled graphs have none."""
        first = None if torch.compiler.is_compiling() else self.input_guess
        return [
            guess if guess is not None and guess.device == device else None
            for guess in (first, self.weight_guess, None)
        ]

    def _empty_output(
        self,
        function: type[torch.autograd.Function],
        x: torch.Tensor,
        w: torch.Tensor,
        scales: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """The output of an x without rows (L-9). Zero rows run if other ranks wait for amaxes."""
        if self.groups.every is None:
            return linear_input.in_high_precision(x, w)
        rows = torch.cat([x.reshape(0, x.shape[-1]), x.new_zeros(1, x.shape[-1])])
        unseen = (None,) * len(ROLES)
        return writable(
            function.apply(rows, w, *unseen, *scales, *unseen)[:0].reshape(*x.shape[:-1], len(w))
        )

    def share(self, cut: Cut, every: str | None) -> None:
        """Have tensor-parallel ranks share this linear, whose parameters are DTensors.

        every     name of the process group of these ranks and those of ``group``; None if there is
                  no ``group``.
        """
        self.cut = cut
        self.groups = Groups(
            batch=self.group, tensor=cut.group, every=every or cut.group, style=cut.style
        )
        for state in self.states.values():
            state.group = self.groups.every  # type: ignore[assignment]
        self._bind()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module's.

        ValueError: parallelize_module cuts the linear, which then would not share amaxes (P-4).
        """
        if param is not None:
            check_part(self, name, param)
        super().register_parameter(name, param)

    def __getstate__(self) -> dict:
        # Without the classes of _bind, which pickle cannot find.
        return {
            key: value
            for key, value in vars(self).items()
            if key not in ("spec", "spec_numbers", "kept") and not key.startswith("_function")
        }

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.kept = None
        self._bind()
        delayed_checks.watch(self)

    def _bind(self) -> None:
        self.spec = _Spec(self.recipe, self.groups, self.kernels)
        sharded_spec = dataclasses.replace(self.spec, sharded=True)
        self.spec_numbers = tuple(
            _NUMBERS.setdefault(spec, len(_NUMBERS)) for spec in (self.spec, sharded_spec)
        )
        self._function, self._function_sharded = _bind(self.spec), _bind(sharded_spec)
        self._function_under_autocast = _bind(dataclasses.replace(self.spec, autocast=True))

    @property
    def spec_number(self) -> int:
        """The number of its spec, for ``_Spec.numbered``."""
        return self.spec_numbers[is_sharded(self)]

    def state(self, role: Role) -> delayed.RoleState | None:
        """The state of a role with delayed scaling, which may be another linear's of the same input
        (``shared_inputs``); None of any other role."""
        if role not in self.states:
            return None
        return self.states[role].origin  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """What nn.Linear prints, and the recipe's name."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


@dataclass(frozen=True)
class _Spec:
    """A linear's constants: recipe, process groups that share amaxes, and what casts. autocast: the
    weight was cast to torch.autocast's dtype for this pass; nothing else keeps it. sharded: FSDP2
    frees the weight after this pass, and codes kept for the backward pass would fill its place."""

    recipe: Recipe
    groups: Groups
    kernels: Choice
    autocast: bool = False
    sharded: bool = False

    @classmethod
    def numbered(cls, number: int) -> "_Spec":
        """The spec of linears with this ``spec_number``, which dynamo reads as a constant."""
        return list(_NUMBERS)[number]

    @functools.cached_property
    def cast_once(self) -> dict[Role, CastSpec | None]:
        """The cast of each role whose two GEMMs take the same codes (L-3); None of any other."""
        first = {
            "input": self.recipe.output.a,
            "weight": self.recipe.output.b,
            "grad_output": self.recipe.grad_input.a,
        }
        return {role: first[role] if self.recipe.serves_both(role) else None for role in ROLES}

    @functools.cached_property
    def uses(self) -> dict[tuple[Gemm, Role], Use]:
        """How each GEMM takes both its operands."""
        uses = {}
        for which, spec in self.recipe.gemms.items():
            operands = zip(OPERANDS[which], (spec.a, spec.b), REDUCED_AXES[which], strict=True)
            for role, cast, axis in operands:
                group = self.groups.sharing(role, cast.granularity, axis - 2) if cast else None
                uses[which, role] = Use(cast, axis - 2, group, ragged=which == "grad_weight")
        return uses

    @functools.cached_property
    def pairs(self) -> dict[Role, tuple[Use, Use]]:
        """How both GEMMs of a role take its tensor, of the roles that kernels can cast once for
        both."""
        uses: dict[Role, tuple[Use, Use]] = {
            "input": (self.uses["output", "input"], self.uses["grad_weight", "input"]),
            "weight": (self.uses["output", "weight"], self.uses["grad_input", "weight"]),
            "grad_output": (
                self.uses["grad_input", "grad_output"],
                self.uses["grad_weight", "grad_output"],
            ),
        }
        return {role: pair for role, pair in uses.items() if both_orders.is_supported(pair)}


_NUMBERS: dict[_Spec, int] = {}


class _Operand(NamedTuple):
    """A role's tensor, hp or quantized, and the scale of its state (None if by its own amax).

    columns   the tensor reduced along its first axis, where kernels cast it once for both GEMMs.
    """

    role: Role
    tensor: Operand
    scale: torch.Tensor | None
    columns: Quantized | None = None

    def cast(self, use: Use) -> Operand:
        """The tensor as a GEMM takes it: cast along its reduced axis, or in high precision.

        Codes that were cast once for both GEMMs only change their reduced axis: one scale serves
        either.
        """
        x, spec = self.tensor, use.cast
        if self.columns is not None and use.axis == self.columns.axis:
            return self.columns
        if isinstance(x, Quantized):
            return x._replace(axis=use.axis)
        if spec is None:
            return x
        if self.scale is not None:
            return scaling.quantize_with(
                x, self.scale, spec.fmt, granularity=spec.granularity, axis=use.axis
            )
        return scaling.quantize(
            x,
            spec.fmt,
            granularity=spec.granularity,
            policy=spec.policy,
            axis=use.axis,
            group=use.group,
            ragged=use.ragged,
        )


def is_sharded(linear: nn.Module) -> bool:
    """Whether FSDP2 shards a linear's weight. While it is gathered, torch counts none of its
    changes."""
    return getattr(linear, "_is_fsdp_managed_module", False)


def casts_by_kernels(recipe: Recipe) -> bool:
    """Whether Triton kernels, where they run, cast every operand of a recipe."""
    return len(roles_by_kernels(recipe)) == len(ROLES)


def roles_by_kernels(recipe: Recipe) -> frozenset[Role]:
    """The roles whose tensors Triton kernels, where they run, cast for both GEMMs at once."""
    return frozenset(_Spec(recipe, Groups(), "auto").pairs)


@functools.lru_cache(maxsize=256)
def _bind(spec: _Spec) -> type[torch.autograd.Function]:
    """x [..., K], w [N, K] -> [..., N], as an autograd.Function. One class per spec: a compiled
    graph passes tensors only, and dynamo would rebuild a spec from proxies, which Recipe's and
    CastSpec's checks cannot read (torch 2.13)."""

    # AOTAutograd traces into it. Dynamo would refuse that its backward pass writes into seen.
    @torch._dynamo.allow_in_graph
    class LinearFunction(torch.autograd.Function):
        @staticmethod
        @linear_input.without_autocast
        def forward(
            ctx, x: torch.Tensor, w: torch.Tensor, *tensors: torch.Tensor | None
        ) -> torch.Tensor:
            states = _States(tensors[:3], tensors[3:6], tensors[6:9])
            return _forward(ctx, spec, x, w, states, tensors[9:])

        @staticmethod
        @linear_input.without_autocast
        def backward(ctx, grad_output: torch.Tensor):
            return _backward(ctx, spec, grad_output)

    return LinearFunction


class _States(NamedTuple):
    """Of each of ROLES, the observation of its state in this pass, float32 [3] or None, its scale
    or None, and a guess of its scale or None."""

    seen: Sequence[torch.Tensor | None]
    scales: Sequence[torch.Tensor | None]
    guesses: Sequence[torch.Tensor | None] = (None, None, None)


def _forward(
    ctx, spec: _Spec, x: torch.Tensor, w: torch.Tensor, states: _States, kept: Sequence
) -> torch.Tensor:
    """output [..., N] of x [..., K] and w [N, K]; observes both. kept: the tensors of
    ``WeightCodes``, if the weight was cast once for several passes."""
    rows = x.reshape(-1, x.shape[-1])  # [M, K]
    input = _operand(spec, "input", rows, states, x)
    if isinstance(w, Float8TrainingTensor):
        weight = _Operand("weight", _gathered(w, spec), states.scales[1])
    elif kept:
        weight = _kept(spec, kept, states)
    else:
        weight = _operand(spec, "weight", w, states)
    a, b = (operand.cast(spec.uses["output", operand.role]) for operand in (input, weight))
    if spec.sharded:
        weight = weight._replace(columns=None)
    # Codes of a weight that FSDP2 gathered are a view of its buffer, which it fills again before
    # the backward pass. Others would be memory of their own: the weight is kept, which a model or
    # FSDP2 has anyway, and cast again by the same scale.
    recasts = (
        spec.cast_once["weight"] is not None
        and weight.columns is None
        and not spec.autocast
        and not isinstance(w, Float8TrainingTensor)
    )
    saved_a, saved_b = _saved(spec, input, a, rows), _saved(spec, weight, b, w)
    if recasts:
        saved_b = (w, *saved_b[1:])
    ctx.columns = input.columns is not None, weight.columns is not None
    ctx.save_for_backward(*saved_a, *saved_b, *states.scales)
    # An attribute, not a saved tensor: other uses of the layer may write it before the backward
    # pass, which autograd would refuse.
    ctx.seen = states.seen[-1]
    output = _multiply(spec, "output", a, b, x.dtype)  # [M, K] @ [K, N] -> [M, N]
    # A reshape is a view, and autograd refuses to change a Function's view in place.
    return torch.ops.aten._unsafe_view(output, (*x.shape[:-1], len(w)))


def _kept(spec: _Spec, tensors: Sequence, states: _States) -> _Operand:
    """The weight from ``WeightCodes.tensors``, observed."""
    *codes, parts = tensors
    cast, seen = spec.pairs["weight"][0].cast, states.seen[1]
    assert cast is not None
    if seen is not None:
        casts.merge_(seen, parts)
    pair = both_orders.pair(cast, codes)
    return _Operand("weight", pair.rows, states.scales[1], pair.columns)


def _operand(
    spec: _Spec, role: Role, x: torch.Tensor, states: _States, whole: torch.Tensor | None = None
) -> _Operand:
    """A role's tensor, observed; cast for both its GEMMs if kernels do.

    whole     the tensor that x is a view of, which other linears may read too.
    """
    place = ROLES.index(role)
    seen, scale = states.seen[place], states.scales[place]
    if _by_kernels(spec, role, x):
        uses, guess = spec.pairs[role], states.guesses[place]
        if whole is None:
            pair = both_orders.quantize(x, uses, scale, guess=guess)
        else:
            pair = recent_cast.quantize(whole, x, uses, scale, guess)
        if seen is not None:
            assert pair.parts is not None
            casts.merge_(seen, pair.parts)
        return _Operand(role, pair.rows, scale, pair.columns)
    if seen is not None:
        delayed.merge_(seen, x)
    return _Operand(role, x, scale)


def _saved(
    spec: _Spec, operand: _Operand, codes: Operand, x: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What the backward pass needs of an operand: its codes for that pass, if they are made, else
    the tensor."""
    if operand.columns is not None:
        columns = operand.columns
        assert columns.transposed is not None
        return columns.transposed, columns.scale, columns.scale_inv
    return _tensors(codes) if spec.cast_once[operand.role] else (x,)


def _loaded(spec: _Spec, role: Role, saved: Iterator, in_columns: bool) -> Operand:
    """The operand of ``_saved``."""
    if in_columns:
        cast = spec.pairs[role][1].cast
        assert cast is not None
        return both_orders.columns(cast, (next(saved), next(saved), next(saved)))
    cast = spec.cast_once[role]
    if cast is None:
        return next(saved)
    return Quantized(next(saved), next(saved), next(saved), cast.fmt, cast.granularity, -1)


def _backward(ctx, spec: _Spec, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """grad_input [..., K] and grad_weight [N, K] of grad_output [..., N]; None where not needed."""
    check_differentiated_once()
    saved = iter(ctx.saved_tensors)
    x = _loaded(spec, "input", saved, ctx.columns[0])
    w = _loaded(spec, "weight", saved, ctx.columns[1])
    if ctx.needs_input_grad[0] and isinstance(w, Quantized):
        w = _in_columns(spec, w)
    scales = input_scale, weight_scale, _ = tuple(saved)
    rows = grad_output.reshape(-1, grad_output.shape[-1])  # [M, N]
    g = _operand(spec, "grad_output", rows, _States((None, None, ctx.seen), scales))
    if spec.cast_once["grad_output"] and g.columns is None:
        g = g._replace(tensor=g.cast(spec.uses["grad_input", "grad_output"]))
    grad_input = grad_weight = None
    if ctx.needs_input_grad[0]:
        # [M, N] @ [N, K] -> [M, K]
        grad_input = _gemm(spec, "grad_input", g, _Operand("weight", w, weight_scale), rows.dtype)
        grad_input = grad_input.reshape(*grad_output.shape[:-1], grad_input.shape[-1])
    if ctx.needs_input_grad[1]:
        # [N, M] @ [M, K] -> [N, K]
        grad_weight = _gemm(spec, "grad_weight", g, _Operand("input", x, input_scale), rows.dtype)
    return grad_input, grad_weight, *(None for _ in ctx.needs_input_grad[2:])


def check_differentiated_once() -> None:
    """ValueError in a backward pass that autograd follows: it can differentiate no codes (L-8)."""
    if torch.is_grad_enabled():
        raise ValueError(
            "gradients of a linear in FP8 are not differentiated again; got create_graph=True. "
            "Leave it out, or keep the linears in high precision with filter_fqns (L-8)."
        )


def _in_columns(spec: _Spec, w: Quantized) -> Quantized:
    """A weight for grad_input: cast again by its scale, if it was kept uncast, and transposed where
    kernels do that."""
    is_cast = w.codes.dtype.itemsize == 1
    if w.transposed is None and _by_kernels(spec, "weight", w.codes):
        if is_cast:
            return w._replace(transposed=casts.transpose(w.codes))
        codes, transposed, _ = casts.cast(w.codes, w.scale, e5m2=w.fmt.name == "e5m2")
        return w._replace(codes=codes, transposed=transposed)
    return w if is_cast else scaling.requantize(w.codes, w)


def _by_kernels(spec: _Spec, role: Role, x: torch.Tensor) -> bool:
    """Whether kernels cast a role's tensor for both its GEMMs at once."""
    return role in spec.pairs and choice.resolve(spec.kernels, x.device)


def _gemm(
    spec: _Spec, which: Gemm, first: _Operand, second: _Operand, dtype: torch.dtype
) -> torch.Tensor:
    """Cast both operands and multiply."""
    a, b = (operand.cast(spec.uses[which, operand.role]) for operand in (first, second))
    return _multiply(spec, which, a, b, dtype)


def _multiply(spec: _Spec, which: Gemm, a: Operand, b: Operand, dtype: torch.dtype) -> torch.Tensor:
    """Multiply a and b along the GEMM's reduced axes; the result is in dtype."""
    gemm_spec = spec.recipe.gemms[which]
    if isinstance(a, Quantized) and isinstance(b, Quantized):
        assert gemm_spec.accumulate is not None
        out_dtype = gemm.output_dtype(gemm_spec, dtype)
        out = gemm.matmul(
            a,
            b,
            accumulate=gemm_spec.accumulate,
            epilogue=gemm_spec.epilogue,
            out_dtype=out_dtype,
            kernels=choice.resolve(spec.kernels, a.codes.device),
        ).to(dtype)
        for observer in observers:
            observer(which, a, b, out)
        return out
    # One operand beside another in high precision: its numbers, in that one's dtype (L-4).
    a, b = (scaling.dequantize(v).to(dtype) if isinstance(v, Quantized) else v for v in (a, b))
    first, second = (axis - 2 for axis in REDUCED_AXES[which])
    return gemm.matmul_hp(a, b, axes=(first, second))


def _gathered(w: Float8TrainingTensor, spec: _Spec) -> Quantized:
    """A weight [N, K] that FSDP2 gathered as codes with one scale."""
    cast = spec.cast_once["weight"]
    assert cast is not None
    return Quantized(w._data, w._scale, w._scale.reciprocal(), cast.fmt, cast.granularity, -1)


def _tensors(q: Operand) -> tuple[torch.Tensor, ...]:
    """A Quantized's tensors, as ``_backward`` reads them."""
    assert isinstance(q, Quantized)
    return q.codes, q.scale, q.scale_inv


def check_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe, if ``Linear`` runs it.

    Raises:   ValueError: operands of a GEMM whose scales cover different lengths of K; an epilogue,
              policy or delayed scaling that this backend does not implement.
    """
    recipe = recipes.by_name(recipe)
    delayed.casts(recipe)
    recipes.check_gemms(recipe, "torch")
    return recipe
