"""fp8ref's own linear layer: three GEMMs by any recipe (spec L).

``convert`` puts it in a model where Triton kernels cast, where ranks share amaxes (the trainer's
default), and for recipes that torchao's Float8Linear cannot express: delayed scaling, block scales.
Otherwise it takes torchao's, whose three GEMMs are in torchao.float8.float8_linear.

Of an input x [M, K], a weight w [N, K] and a grad_output g [M, N], cast to FP8 by the recipe:

    output      = x @ w.T    [M, K] @ [K, N] -> [M, N]
    grad_input  = g @ w      [M, N] @ [N, K] -> [M, K]
    grad_weight = g.T @ x    [N, M] @ [M, K] -> [N, K]

``passes.Pass`` computes them, from operands that it casts for each GEMM, or for both at once where
kernels cast. Results have x's dtype. FSDP2 averages grad_weight over ranks afterwards, in the
reduce_dtype of ``Parallelism``.
"""

import dataclasses
import functools

import torch
from torch import Tensor, nn
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from fp8ref import recipe as recipes
from fp8ref.recipe import ROLES, Recipe, Role
from fp8ref.spec.kernels import Choice
from fp8ref.spec.kernels import check as check_kernels
from fp8ref.torch import delayed
from fp8ref.torch.delayed import state_checks as delayed_checks
from fp8ref.torch.delayed.role_states import role_states
from fp8ref.torch.linear import both_orders
from fp8ref.torch.linear.cut import Cut, check_part, writable
from fp8ref.torch.linear.passes import KEPT, Pass, load, save, zero_row
from fp8ref.torch.linear.spec import Spec
from fp8ref.torch.linear.weight_codes import WeightCodes
from fp8ref.torch.quantize.scaling import Groups
from fp8ref.torch.tensors import linear_input

__all__ = ["Linear", "check_recipe", "is_sharded"]


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
    keys      of a stochastic recipe, the seeds of its GEMMs, which ``rounding.seed_`` writes.
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
              another K, dtype or device than the weight's, or another rank of ``group`` whose casts
              are not by the same kernels.
    """

    fqn: str = ""
    kernels: Choice = "auto"
    kept: WeightCodes | None
    input_guess: Tensor | None
    weight_guess: Tensor | None
    keys: Tensor | None

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
        self.register_buffer("keys", None, persistent=False)
        for role in ROLES[:2]:
            guessed = role in self.spec.pairs and both_orders.is_guessed(self.spec.pairs[role])
            bits = torch.zeros((), dtype=torch.int32, device=self.weight.device)
            self.register_buffer(f"{role}_guess", bits if guessed else None, persistent=False)
        casts = delayed.casts(self.recipe)
        self.states = role_states(casts, self.weight.device, group)
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
    def forward(self, input: Tensor) -> Tensor:
        """output [..., N] of input [..., K]. ValueError as in linear_input."""
        x = linear_input.checked_input(input if self.cut is None else self.cut.enter(input), self)
        w, *others = self.tensors(x)
        assert w is not None
        if delayed.calibrating():
            y = self._calibrated(x, w)
        elif x.numel():
            y = self._function(w).apply(x, w, *others)
        elif self.groups.every is None:
            y = linear_input.in_high_precision(x, w)
        else:
            # Other ranks wait for amaxes (L-9): a row of zeros runs.
            y = self._function(w).apply(zero_row(x, self.spec.rows), w, *others)
            y = writable(y[:0].reshape(*x.shape[:-1], len(w)))
        bias: Tensor | None = self.bias
        if self.cut is not None:
            y, bias = self.cut.leave(y), None if bias is None else self.cut.bias(bias)
        return y if bias is None else y + bias.to(y.dtype)

    def tensors(self, x: Tensor) -> list[Tensor | None]:
        """What ``Pass.of`` takes in a pass of x: the weight in x's dtype, and its other tensors."""
        w = linear_input.weight(self, x)
        if self._stochastic and self.keys is None and self.training and torch.is_grad_enabled():
            self._refuse()  # the backward pass does not know the linear
        observes = x.numel() > 0 and delayed.observes(self)
        states = [self.state(role) for role in ROLES]
        delayed_checks.check_pass(self, self.states, x, observes)
        seen = [state.seen if observes and state else None for state in states]
        if isinstance(w, Float8TrainingTensor):
            seen[1] = None  # fp8_gather.FP8Gather has observed this rank's shard already
        scales = [state.scale if state else None for state in states]
        kept = () if self.kept is None else self.kept.serving(w, self.fqn)
        guesses = self.guesses(x.device)
        return [w, self.keys, *seen, *scales, *guesses, *(kept or [None] * KEPT)]

    def guesses(self, device: torch.device) -> list[Tensor | None]:
        """A guess for each of ROLES, on a device. A compiler takes an input's amax in the kernel
        that makes it, and casts what linears share once: inputs of compiled graphs have none."""
        first = None if torch.compiler.is_compiling() else self.input_guess
        return [
            guess if guess is not None and guess.device == device else None
            for guess in (first, self.weight_guess, None)
        ]

    def _calibrated(self, x: Tensor, w: Tensor) -> Tensor:
        """The output in high precision; input and weight are observed."""
        for role, tensor in zip(ROLES[:2], (x, w), strict=True):
            state = self.state(role)
            if state and not isinstance(tensor, Float8TrainingTensor):
                state.observe(tensor)
        return linear_input.calibrated(x, w, self.fqn)

    def _function(self, w: Tensor) -> type[torch.autograd.Function]:
        """The function of a pass by this weight, which torch.autocast may have cast."""
        if w.dtype != self.weight.dtype:
            return self._functions[2]
        return self._functions[1] if is_sharded(self) else self._functions[0]

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
            if key not in ("spec", "kept", "_numbers", "_functions")
        }

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.kept = None
        self._bind()
        delayed_checks.watch(self)

    def _refuse(self) -> None:
        # apart, since graphs that read a name are of one linear
        text = "rounds stochastically in training, by a seed (S-24); got none. Call"
        raise ValueError(
            f"{linear_input.named(self.fqn)} {text} fp8ref.torch.linear.rounding.seed_(model, "
            "seed) before a pass."
        )

    def _bind(self) -> None:
        self._stochastic = self.recipe.stochastic
        self.spec = Spec(self.recipe, self.groups, self.kernels)
        specs = [
            self.spec,
            dataclasses.replace(self.spec, sharded=True),
            dataclasses.replace(self.spec, autocast=True),
        ]
        self._functions = tuple(map(_bind, specs))
        self._numbers = tuple(spec.number for spec in specs)

    @property
    def spec_number(self) -> int:
        """The number of its spec, for ``Spec.numbered``."""
        return self._numbers[is_sharded(self)]

    def state(self, role: Role) -> delayed.RoleState | None:
        """The state of a role with delayed scaling, which may be another linear's of the same input
        (``shared_inputs``); None of any other role."""
        if role not in self.states:
            return None
        return self.states[role].origin  # type: ignore[return-value]

    def extra_repr(self) -> str:
        """What nn.Linear prints, and the recipe's name."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def is_sharded(linear: nn.Module) -> bool:
    """Whether FSDP2 shards a linear's weight; of gathered ones torch counts no changes."""
    return getattr(linear, "_is_fsdp_managed_module", False)


@functools.lru_cache(maxsize=256)
def _bind(spec: Spec) -> type[torch.autograd.Function]:
    """x [..., K] and a pass's TENSORS -> [..., N], as an autograd.Function. One class per spec: a
    compiled graph passes tensors only, and dynamo would rebuild a spec from proxies, which Recipe's
    and CastSpec's checks cannot read (torch 2.13)."""

    # AOTAutograd traces into it. Dynamo would refuse that its backward pass writes into seen.
    @torch._dynamo.allow_in_graph
    class LinearFunction(torch.autograd.Function):
        @staticmethod
        @linear_input.without_autocast
        def forward(ctx, x: Tensor, *tensors: Tensor | None) -> Tensor:
            linear, rows = Pass.of(spec, tensors), x.reshape(-1, x.shape[-1])  # [M, K]
            operand = linear.operand("input", rows, x)
            y, (saved, weight) = linear.output(operand, x.shape, x.dtype)
            save(ctx, [linear], [(rows if saved is None else saved, weight)])
            return y

        @staticmethod
        @linear_input.without_autocast
        def backward(ctx, grad_output: Tensor):
            (linear,), _ = load(ctx, [spec])
            rows = grad_output.reshape(-1, grad_output.shape[-1])  # [M, N]
            g, grad_input, grad_weight = linear.operand("grad_output", rows), None, None
            if ctx.needs_input_grad[0]:
                grad_input = linear.grad_input(g, rows.dtype)
                grad_input = grad_input.reshape(*grad_output.shape[:-1], grad_input.shape[-1])
            if ctx.needs_input_grad[1]:
                grad_weight = linear.grad_weight(g, linear.input, rows.dtype)
            return grad_input, grad_weight, *(None for _ in ctx.needs_input_grad[2:])

    return LinearFunction


def check_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe, if ``Linear`` runs it.

    Raises:   ValueError: operands of a GEMM whose scales cover different lengths of K; an epilogue,
              policy or delayed scaling that this backend does not implement.
    """
    recipe = recipes.by_name(recipe)
    delayed.casts(recipe)
    recipes.check_gemms(recipe, "torch")
    return recipe
