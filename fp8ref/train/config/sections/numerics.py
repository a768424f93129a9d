"""Section numerics: what runs in FP8, and how (spec R)."""

from dataclasses import dataclass
from typing import Literal, get_args

from fp8ref import recipe as recipes
from fp8ref.selection import attention_casts
from fp8ref.selection.rules import Rule
from fp8ref.shared.errors import one_of, require
from fp8ref.spec.attention import delayed as attention_delayed
from fp8ref.spec.attention import variants as attention
from fp8ref.spec.attention.variants import Backward
from fp8ref.spec.kernels import Choice
from fp8ref.spec.products import Products
from fp8ref.train.config import schedule as schedules


@dataclass(frozen=True, kw_only=True)
class NumericsConfig:
    """Which linears run in FP8, and how (spec R)."""

    recipe: str = "tensorwise"
    """How linears are cast: a name that ``fp8ref recipes`` lists."""
    schedule: schedules.Entries | None = None
    """Recipes by phase, such as [[0, "tensorwise"], [8000, "bf16"]], the first of them
    numerics.recipe. A phase begins at a step, or at a string: "learning_rate < 3e-4" after warm-up,
    or, of what statistics.every measures, "sqnr < 18" (dB) of an operand of the phase before or
    "update_error > 0.1" of optimizer states."""
    filter_fqns: tuple[str, ...] = ()
    """Modules to keep in high precision. Names are whole components or shell patterns;
    ``auto_filter_small_kn`` keeps small linears. lm_head is always kept."""
    fp8_fqns: tuple[str, ...] = ()
    """Modules to convert even if filter_fqns names them; lm_head too."""
    rules: tuple[Rule, ...] | None = None
    """Tables [[numerics.rules]] that change casts of single operands: layers, gemms and roles, and
    the recipe, or the format, granularity or policy, that they take. In a file alone; on one
    device."""
    accumulate: str | None = None
    """Simulated hardware for FP8 GEMMs, on a CPU: hopper (hopper_fast or hopper_slow, as the recipe
    says), exact, f32, hopper_fast, hopper_slow, ada, blackwell, or a .json file of ``fp8ref
    probe``. native, the default: the framework's own GEMMs."""
    products: Products = "auto"
    """What multiplies operands in blocks: "emulated", float32 on dequantized ones; MX and NVFP4
    hardware by "scaled_mm" (PyTorch) or "scaled_matmul" (JAX); or "auto", kernels of G-17."""
    kernels: Choice = "auto"
    """How tensors are cast: "plain" by the framework's operations; "triton" by fp8ref's Triton
    kernels, on a CPU in Triton's interpreter, which is slow; "auto" by the kernels on a GPU that
    casts to FP8, where they pass a check. All give the same codes."""
    attention: str | None = None
    """Attention, a tile of keys after another, by a variant (spec A-1): in FP8 cudnn or mxfp8, or
    with numerics.attention_backward bf16 also fa3, fa3_promoted, fa4, fa4_threshold4 and fa3_paper;
    bf16, or exact. Default: the framework's own, in bfloat16."""
    attention_backward: Backward = "own"
    """The backward pass of numerics.attention in FP8: the variant's own, or bf16, of q, k and v in
    bfloat16 with the log-sum-exp of the FP8 pass (spec A-25). FlashAttention's kernels in FP8 have
    none of their own."""
    attention_arithmetic: Literal["fast", "stated"] = "fast"
    """How numerics.attention computes between its products: by the framework's own sums and
    functions, within A-18's bound; or every operation in the stated order, rounded once, several
    times slower."""

    attention_scaling: Literal["current", "delayed"] = "current"
    """Where numerics.attention has its scales from: the tensors of the step itself; or, of cudnn
    alone, the amaxes of past steps (spec A-19), a state for each of q, k, v, s, o, do, ds, dq, dk
    and dv of a layer."""

    attention_operands: tuple[str, ...] | None = None
    """Of numerics.attention 'cudnn', the operands that alone are cast, q, k, v, p, do and ds, of
    every layer or, as "layers.0/q", of those that a pattern names. All else of attention is in
    float32, on whole matrices (spec E-9). Default: all, a tile of keys after another."""

    def __post_init__(self) -> None:
        recipes.check_trained(self.recipe, "numerics.recipe")
        one_of("numerics.kernels", self.kernels, get_args(Choice))
        one_of("numerics.products", self.products, get_args(Products))
        text = "numerics.accumulate simulates what numerics.products name. Leave one of them out."
        require(not self.simulates or self.products == "auto", text)
        if self.schedule is not None:
            first = schedules.parse(self.schedule)[0].recipe
            require(
                first == self.recipe,
                f"numerics.schedule begins with numerics.recipe, which is {self.recipe!r}; got "
                f"{first!r}. Set both to one recipe, or leave out the schedule.",
            )
        require(
            self.rules is None or self.schedule is None,
            "numerics.rules change one recipe; got numerics.schedule too. Leave one of them out.",
        )
        require(
            self.rules is None or len(self.rules) > 0,
            "numerics.rules has at least one rule; got none. Leave it out.",
        )
        require(
            self.accumulate != "",
            "numerics.accumulate names simulated hardware; got ''. Leave it out for the "
            "framework's own GEMMs.",
        )
        self._check_attention()

    def _check_attention(self) -> None:
        """ValueError for keys of attention that do not fit each other."""
        for key, values in {
            "attention_arithmetic": attention.ARITHMETIC,
            "attention_scaling": ("current", "delayed"),
            "attention_backward": get_args(Backward),
        }.items():
            value = getattr(self, key)
            names = ", ".join(values)
            require(value in values, f"numerics.{key} is one of {names}; got {value!r}.")
            require(
                self.attention is not None or value == values[0] or key == "attention_scaling",
                f"numerics.{key} is of numerics.attention, which is left out; got {value!r}. Leave "
                "both out, or name a variant.",
            )
        require(
            self.attention_scaling == "current"
            or (
                self.attention in attention.VARIANTS
                and bool(attention_delayed.roles(attention.by_name(self.attention)))
            ),
            "numerics.attention_scaling 'delayed' is of attention with one FP8 scale for a "
            f"tensor; got numerics.attention {self.attention!r}. Use variant 'cudnn', or leave "
            "it out.",
        )
        if self.attention_operands is not None:
            self._check_attention_operands(self.attention_operands)
        if self.attention is not None:
            self._check_variant(self.attention)

    def _check_attention_operands(self, operands: tuple[str, ...]) -> None:
        require(
            self.attention in attention.VARIANTS
            and (self.attention_scaling, self.attention_backward, self.attention_arithmetic)
            == ("current", "own", "fast")
            and not self.simulates,
            "numerics.attention_operands are of numerics.attention, with its own backward "
            "pass, scales of the tensors themselves, fast arithmetic and the framework's "
            f"own GEMMs; got {self.attention!r}, {self.attention_backward!r}, "
            f"{self.attention_scaling!r}, {self.attention_arithmetic!r} and "
            f"numerics.accumulate {self.accumulate!r}. Leave them out, or set attention to "
            "cudnn.",
        )
        roles = frozenset(operand.rpartition("/")[2] for operand in operands)
        attention_casts.Casts(attention.by_name(str(self.attention)), roles)  # type: ignore[arg-type]  # refuses unknown ones

    def _check_variant(self, name: str) -> None:
        variants = attention.VARIANTS
        trained = [key for key, variant in variants.items() if variant.backward is not None]
        forward = [key for key in variants if key not in trained]
        require(
            name in trained or (name in forward and self.attention_backward == "bf16"),
            f"numerics.attention is one of {', '.join(trained)}, which have gradients, or with "
            f"numerics.attention_backward 'bf16' of {', '.join(forward)}; got {name!r}. Leave it "
            "out for the framework's own attention.",
        )
        require(
            self.attention_backward == "own" or variants[name].fmt.bits == 8,
            "numerics.attention_backward 'bf16' is of a forward pass in FP8; got "
            f"numerics.attention {name!r}. Leave it out.",
        )
        require(
            not self.simulates or variants[name].granularity != "mx_1x32",
            "numerics.accumulate multiplies FP8 codes, and attention multiplies MX blocks "
            f"dequantized; got {self.accumulate!r} with numerics.attention {name!r}. Leave one of "
            "them out, or use variant 'cudnn'.",
        )

    def unattended(self, head_dim: int) -> list[str]:
        """The error messages for heads of this size under ``attention``; empty if they fit."""
        if self.attention is None:
            return []
        variant = attention.by_name(self.attention)
        largest = variant.tiles[-1].features
        multiple = 32 if variant.granularity == "mx_1x32" else 1
        fits = head_dim % multiple == 0 and (variant.real or head_dim <= largest)
        sizes = f"at most {largest} features"
        if multiple > 1:
            sizes = f"a multiple of {multiple} up to {largest}"
        if fits:
            return []
        return [
            f"numerics.attention {self.attention!r} takes heads of {sizes}; got {head_dim}. "
            "Leave it out."
        ]

    @property
    def simulates(self) -> bool:
        """Whether FP8 GEMMs run under simulated hardware."""
        return self.accumulate not in (None, "native")

    def check_multiply(self, multiply: object) -> None:
        """ValueError unless ``multiply`` was given if, and only if, ``accumulate`` asks for it."""
        multiply_name = "none" if multiply is None else getattr(multiply, "name", repr(multiply))
        require(
            self.simulates == (multiply is not None),
            f"numerics.accumulate is {self.accumulate!r}, but the trainer was given multiply "
            f"{multiply_name}. Make trainers with fp8ref.train.loop.trainer.",
        )
