"""FP8 GEMMs (spec G): by torch._scaled_mm, block kernels, or on dequantized operands."""

import functools
import math
import warnings

import torch
from torch import Tensor
from torch.nn import functional

from fp8ref.formats import E2M1FN
from fp8ref.recipe import GemmSpec, Recipe
from fp8ref.shared.errors import require
from fp8ref.spec import epilogue as epilogues
from fp8ref.spec import support
from fp8ref.spec.granularity import by_name
from fp8ref.torch.gemm import blocks, hardware
from fp8ref.torch.gemm.kind import GemmKind
from fp8ref.torch.kernels import casts
from fp8ref.torch.quantize import cast, float_values, scaling
from fp8ref.torch.quantize.scaling import Quantized

__all__ = ["EPILOGUES", "matmul", "matmul_hp", "output_dtype", "use_native_scaled_mm"]

EPILOGUES = support.EPILOGUES["torch"]
"""The epilogues that this backend implements."""

SCALED_MM = "torch._scaled_mm"
"""The kernel of scales over all of K, by its name in reports."""


def matmul(
    a: Quantized,
    b: Quantized,
    *,
    accumulate: str,
    epilogue: str = "scale_then_round",
    out_dtype: torch.dtype = torch.float32,
    kernels: bool = False,
) -> Tensor:
    """Multiply a and b along their reduced axes: [M, K] x [N, K] -> [M, N].

    With reduced axis 0, [K, M] serves as [M, K].

    kernels   whether a Triton kernel scales a product of unit scales (G-5), to the same bits.
    Shapes:   codes of matrices; scale_inv of both over all of K, or of both in blocks of K of one
              length; out [M, N] of out_dtype. Under rowwise scales a device's kernel may support
              bfloat16 only (``output_dtype``).
    Order:    torch._scaled_mm with both scale_inv, rounded to out_dtype (G-4); or unit scales,
              rounded, times the product of both, rounded (G-5). Block operands go to cuBLASLt's,
              DeepGEMM's or torchao's kernel if there is one (G-17, ``blocks.kernel``). Else they
              are dequantized first, and multiplied in float32 (G-16); of two levels by the blocks'
              scales, and the sum by the product of the tensors' (S-22). K is padded with zeros to a
              multiple of 16, which changes no bit. Within ``hardware.simulating``, simulated
              hardware computes all of it, blocks too (G-19).
    Specials: Inf and NaN as in IEEE 754; overflow to infinity.
    Raises:   ValueError: operands that are not 2-d; reduced lengths that differ; unknown names;
              granularities that do not go together (``epilogue.check_pair``); blocks under
              unit_round_scale_round; e2m1fn in simulated hardware.
    Source:   spec G-1, G-4, G-5, G-7, G-13, G-16, G-17; torchao 0.18's addmm_float8_unwrapped.
    """
    _check(a, b, accumulate)
    block = epilogues.check_pair(epilogue, "torch", a.granularity, b.granularity)
    if by := hardware.active():
        codes_a, codes_b = (_codes(q) for q in (a, b))
        scale_a, scale_b = (_lines(q.scale_inv, q.axis) for q in (a, b))
        kind = GemmKind(a.granularity, b.granularity, accumulate, epilogue)
        return hardware.multiply(codes_a, codes_b, scale_a, scale_b, kind.text, out_dtype, by.name)
    if block is not None:
        return _multiply_blocks(a, b, out_dtype)
    # Hopper multiplies FP8 only if both operands are contiguous along K.
    codes_a, codes_b = (_padded(_codes(q)).contiguous() for q in (a, b))
    scale_a, scale_b = _scales(a, b)
    unit = epilogue == "unit_round_scale_round"
    gemm_scales = (_unit(codes_a),) * 2 if unit else (scale_a, scale_b)
    out = torch._scaled_mm(  # [M, K] @ [K, N] -> [M, N]
        codes_a,
        codes_b.t(),
        scale_a=gemm_scales[0],
        scale_b=gemm_scales[1],
        out_dtype=out_dtype,
        use_fast_accum=accumulate == "fast",
    )
    if unit and kernels and scale_a.ndim and not torch.compiler.is_compiling():
        return casts.scaled(out, scale_a, scale_b)
    # Into another tensor: selective checkpointing keeps the result, and refuses written ones.
    return torch.mul(out, scale_a * scale_b, out=torch.empty_like(out)) if unit else out


def _check(a: Quantized, b: Quantized, accumulate: str) -> None:
    if accumulate not in ("fast", "slow"):
        raise ValueError(f"accumulate is 'fast' or 'slow'; got {accumulate!r}.")
    shapes = tuple(a.codes.shape), tuple(b.codes.shape)
    if any(len(shape) != 2 for shape in shapes) or shapes[0][a.axis] != shapes[1][b.axis]:
        raise ValueError(
            f"a GEMM reduces one axis of two matrices, of one length; got {shapes[0]} along "
            f"{a.axis} and {shapes[1]} along {b.axis}."
        )
    if hardware.active():
        require(  # by the format: its numbers are in e4m3fn, which tensor cores multiply
            E2M1FN not in (a.fmt, b.fmt),
            f"simulated hardware multiplies FP8 codes; got {a.fmt} x {b.fmt}. Leave "
            "hardware.simulating for this linear (R-9).",
        )


def _multiply_blocks(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    """[M, N] of operands in blocks of K, by a kernel on codes or in float32 (G-16, G-17)."""
    # the scales of tensors multiply the sum (S-22)
    factors = [f for f in (a.tensor_scale_inv, b.tensor_scale_inv) if f is not None]
    factor = math.prod(factors) if factors else None
    if (kernel := blocks.kernel(a, b)) == "dequantized":
        by_blocks = (q._replace(tensor_scale_inv=None) for q in (a, b))
        hp_a, hp_b = (_lines(scaling.dequantize(q), q.axis) for q in by_blocks)
        out = torch.mm(hp_a, hp_b.t())  # [M, K] @ [K, N] -> [M, N]
        return (out if factor is None else out * factor).to(out_dtype)
    multiple = by_name(a.granularity).reduced or blocks.BLOCK
    codes_a, codes_b = (_padded(_codes(q), multiple) for q in (a, b))
    scale_a, scale_b = (_lines(q.scale_inv, q.axis) for q in (a, b))
    return blocks.multiply(codes_a, codes_b, scale_a, scale_b, out_dtype, kernel, factor)


def matmul_hp(a: Tensor, b: Tensor, *, axes: tuple[int, int]) -> Tensor:
    """A GEMM in high precision (G-9), along axes: [M, K] x [N, K] -> [M, N] of one dtype."""
    return torch.mm(_lines(a, axes[0]), _lines(b, axes[1]).t())


def output_dtype(spec: GemmSpec, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a GEMM rounds to before its result is cast to dtype (spec G-8)."""
    return torch.bfloat16 if spec.rowwise else dtype


def kernel(recipe: Recipe, device: torch.device, shape: tuple[int, int]) -> str:
    """What multiplies a recipe's codes on a device, for reports; shape: the weight's, [N, K]."""
    if by := hardware.active():
        return by.name
    fp8 = [(which, s.a, s.b) for which, s in recipe.gemms.items() if s.a and s.b]
    if not any(in_blocks(a.granularity) for _, a, _ in fp8):
        return SCALED_MM
    columns = {"output": shape[0], "grad_input": shape[1], "grad_weight": shape[1]}
    keys = {blocks.takes(a, b, device, columns=columns[which]) for which, a, b in fp8}
    return " and ".join(name for key, name in blocks.NAMES.items() if key in keys)


def in_blocks(granularity: str) -> bool:
    """Whether scales vary along K, so that torch._scaled_mm cannot multiply the operands."""
    return by_name(granularity).reduced is not None


def _codes(q: Quantized) -> Tensor:
    """The codes with their reduced axis last."""
    return _lines(q.codes, q.axis) if q.axis % 2 or q.transposed is None else q.transposed


def _lines(x: Tensor, axis: int) -> Tensor:
    """The matrix with its reduced axis last."""
    return x if axis % 2 == 1 or x.ndim == 0 else x.t()


def _unit(like: Tensor) -> Tensor:
    """1 on a tensor's device. A kept one, so that no GEMM launches it, unless a compiler traces."""
    if type(like) is Tensor:
        return _kept_unit(like.device)
    return torch.ones((), dtype=torch.float32, device=like.device)


@functools.cache
def _kept_unit(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones((), dtype=torch.float32, device=device)


def is_kept_unit(scale: Tensor) -> bool:
    """Whether a scale is the 1 of GEMMs under unit scales (G-5), for proofs."""
    return scale is _kept_unit(scale.device)


def _padded(codes: Tensor, multiple: int = 16) -> Tensor:
    """Codes [M, K] with K padded to a multiple, which the kernels require."""
    k = codes.shape[1]
    if k % multiple == 0:
        return codes
    # code 0 is zero
    return functional.pad(codes.view(torch.uint8), (0, -k % multiple)).view(codes.dtype)


def _scales(a: Quantized, b: Quantized) -> tuple[Tensor, Tensor]:
    """scale_inv of both, () or [M, 1] and [1, N]; a tensorwise one is repeated by row (L-4)."""
    if a.granularity == b.granularity == "tensorwise":
        return a.scale_inv, b.scale_inv
    rows, columns = (
        q.scale_inv.expand(q.codes.shape[1 - q.axis % 2]) if q.scale_inv.ndim == 0 else q.scale_inv
        for q in (a, b)
    )
    return rows.reshape(-1, 1).contiguous(), columns.reshape(1, -1).contiguous()


@functools.cache
def use_native_scaled_mm() -> None:
    """Make ``torch._scaled_mm`` on a CPU run without oneDNN, for the rest of the process.

    Idempotent.

    For tensorwise e4m3 on processors without FP8 instructions, oneDNN's kernel is a plain loop: 4.6
    s for 2048 x 128 x 384. torch's own kernel takes 2 ms (torch 2.13), and more for converting the
    codes one by one. So ``_scaled_product`` does what that kernel does, with ``float_values``. All
    satisfy spec B-1, and the last two are equal bit for bit.
    """
    kernel = torch.library.get_kernel("aten::_scaled_mm", "CPU")

    def without_onednn(keyset, *args, **kwargs):
        enabled = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        try:
            out = _scaled_product(*args, **kwargs)
            return kernel.call_boxed(keyset, *args, **kwargs) if out is None else out
        finally:
            torch.backends.mkldnn.enabled = enabled

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "(?s).*Overriding a previously registered kernel", UserWarning
        )
        _library().impl("_scaled_mm", without_onednn, "CPU", with_keyset=True)


def _scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *options
) -> Tensor | None:
    """``torch._scaled_mm`` on a CPU, as its own kernel computes it: float32(A) * scale_a times
    float32(B) * scale_b, both row-major, rounded. None: arguments that are left to that kernel.

    options   bias, scale_result, out_dtype and use_fast_accum.
    Shapes:   [M, K] @ [K, N] -> [M, N]; scales of one element, or [M, 1] and [1, N].
    """
    bias, scale_result, out_dtype = (*options, None, None, None)[:3]
    shapes = tuple(scale_a.shape), tuple(scale_b.shape)
    if (
        bias is not None
        or scale_result is not None
        or out_dtype not in cast.HIGH_PRECISION
        or not {a.dtype, b.dtype} <= {torch.float8_e4m3fn, torch.float8_e5m2}
        or (scale_a.dtype, scale_b.dtype) != (torch.float32, torch.float32)
        or (a.ndim, b.ndim) != (2, 2)
        or max(scale_a.ndim, scale_b.ndim) > 2
        or a.shape[1] != b.shape[0]
        or (scale_a.numel() * scale_b.numel() > 1 and shapes != ((len(a), 1), (1, b.shape[1])))
    ):
        return None
    hp_a = float_values.decode(_row_major(a)).mul_(scale_a)
    hp_b = float_values.decode(_row_major(b)).mul_(scale_b)
    with torch.autocast("cpu", enabled=False):
        return torch.mm(hp_a, hp_b).to(out_dtype)


def _row_major(x: Tensor) -> Tensor:
    """x.contiguous(), which who counts a model's copies does not see: a GPU makes none here."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def check_cpu(recipe: Recipe) -> None:
    """ValueError for a recipe that torch cannot multiply on a CPU: rowwise, before 2.13."""
    if (
        any(spec.rowwise and spec.epilogue == "scale_then_round" for spec in recipe.gemms.values())
        and not _cpu_multiplies_rows()
    ):
        raise ValueError(
            f"recipe {recipe.name!r} scales by rows, which torch {torch.__version__} "
            "multiplies only on a GPU. Move the model there first, install torch 2.13, or use "
            "recipe 'tensorwise'."
        )


@functools.cache
def _cpu_multiplies_rows() -> bool:
    """Whether _scaled_mm takes rowwise scales on this CPU."""
    codes = torch.zeros(16, 16, dtype=torch.float8_e4m3fn, device="cpu")
    scale = torch.ones(16, 1, dtype=torch.float32, device="cpu")
    try:
        torch._scaled_mm(
            codes, codes.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16
        )
    except RuntimeError:
        return False
    return True


@functools.cache
def _library() -> torch.library.Library:
    """The library of the registration, cached because the registration ends with it."""
    return torch.library.Library("aten", "IMPL", "CPU")
