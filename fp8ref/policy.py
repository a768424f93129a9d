"""Scale policies as data: every decision between an amax and a scale (spec S-3, S-4, S-9 to
S-15, S-17, S-20, S-22).

One dataclass holds the decisions, and the policy of each library is one value of it. ``sim.scales``
implements all of them; a backend implements some and refuses the others. Code asks for decisions,
never for a policy's name, so a policy that other values of the same decisions express is one line
of POLICIES.
"""

import dataclasses

from fp8ref import registry
from fp8ref.formats import BFLOAT16
from fp8ref.scale_policy import E8M0Rule as E8M0Rule
from fp8ref.scale_policy import ScalePolicy as ScalePolicy
from fp8ref.scale_policy import TwoLevel as TwoLevel

# torchao 0.18, float8/float8_utils.py: amax_to_scale, _round_scale_down_to_power_of_2.
_TORCHAO = ScalePolicy(name="torchao", eps=1e-12)

# TransformerEngine, common/recipe/recipe_common.cuh: compute_scale_from_amax (commit 01c24fe0),
# called by current_scaling.cu with value_for_inf = FLT_MAX, and by
# transpose/quantize_transpose_{vector,square}_blockwise.cu with the largest finite value of the
# tensor's dtype: masked, 2^127 for float32 and bfloat16; float16 amaxes never overflow. Defaults of
# common/recipe/__init__.py: Float8CurrentScaling, Float8BlockScaling (eps 0; the latter powers of
# two).
_TE_CURRENT = ScalePolicy(name="te_current", overflow="float32_max", zero="one", infinite="one", nan="one")

# TransformerEngine, common/recipe/delayed_scaling.cu: kernel, kernel_bulk (commit 6b71a0ad).
_TE_DELAYED = ScalePolicy(name="te_delayed", overflow="float32_max", zero="keep", infinite="keep", nan="keep")

# flax 0.12.8, linen/fp8_ops.py: compute_scale, quantize. The quotient is formed, and its reciprocal
# stored.
_FLAX = ScalePolicy(name="flax", zero="keep", infinite="keep", nan="keep", stored="scale_inv")

# MS-AMP (commit 0367bdc5), msamp/common/tensor/meta.py: ScalingMeta.compute_scaling_factor. In
# PyTorch number / tensor is number * (1 / tensor); the last `where` of that function inverts its result
# if the exponent is negative.
_MSAMP = ScalePolicy(name="msamp", ratio="max*(1/amax)", power_of_two="exp2_log2", zero="keep", infinite="keep_inverse", nan="keep")

# TransformerEngine, common/recipe/recipe_common.cuh: compute_scale_from_types (d0067d0d), value_for_inf
# of bfloat16 tensors. Masked it is 2^127, as in te_block.
_TE_BLOCK_BF16 = dataclasses.replace(_TE_CURRENT, name="te_block_unmasked_bf16", overflow="bfloat16_max")

# torchao 0.18, prototype/mx_formats/mx_tensor.py: to_mx (FLOOR, CEIL, EVEN), _to_mx_rceil.
_MX_FLOOR = ScalePolicy(
    name="mx_floor", ratio="exponents", power_of_two="mask", e8m0=E8M0Rule(scale_of_code_0=2.0**126, scale_of_nan="zero")
)
_MX_RCEIL = ScalePolicy(name="mx_rceil", ratio="amax/max", power_of_two="exp2_log2", e8m0=E8M0Rule(scale_of_code_0=1.0, scale_of_nan="nan"))

# DeepGEMM (commit 54e22612), deep_gemm/utils/math.py: per_token_cast_to_fp8, per_channel_cast_to_fp8,
# per_block_cast_to_fp8, per_custom_dims_cast_to_fp8. The floor is clamp(1e-4) of a float32 tensor.
# On a GPU, PyTorch computes tensor / number as tensor * (1 / number) (aten/src/ATen/native/cuda/
# BinaryDivTrueKernel.cu); on a CPU it divides.
_DEEPGEMM = ScalePolicy(name="deepgemm", eps=1e-4, ratio="amax*(1/max)")

# torchao 0.18, optim/subclass_fp8.py: quantize_fp8, the blocks of AdamWFp8, on a CPU.
_ADAMW_FP8 = ScalePolicy(name="torchao_adamw_fp8", eps=1e-12, ratio="amax/max", stored="scale_inv")

# DeepSeek-V3, inference/kernel.py: act_quant_kernel, with scale_fmt None (commit 9b4e9788). Until
# then it had no eps (commit 06231633).
_DEEPSEEK = dataclasses.replace(_ADAMW_FP8, name="deepseek_v3", eps=1e-4)

# vLLM, fp8_utils.py: _per_token_group_quant_fp8 divides by amax / max. SGLang's
# _per_token_group_quant_8bit multiplies by its reciprocal; slime, miles and verl do the same. Both
# floor the amax at 1e-10.
_VLLM = dataclasses.replace(_ADAMW_FP8, name="vllm", eps=1e-10)
_SGLANG = ScalePolicy(name="sglang", eps=1e-10, ratio="amax/max")

# microxcaling (commit 3b429a84), mx/mx_ops.py: _shared_exponents, _quantize_mx, on a CPU. gfloat 0.5.2,
# block.py: compute_scale_amax. Both take log2 in float32.
_MICROXCALING = ScalePolicy(
    name="microxcaling",
    ratio="exponents",
    power_of_two="exp2_log2",
    e8m0=E8M0Rule(scale_of_code_0=2.0**127, scale_of_nan="nan", infinite="as_nan"),
)

# qwix (commit aa623acb), qwix/_src/core/qarray.py: compute_scale_zero_point,
# quantize_with_scale_zero_point: of float32 arrays, of bfloat16 ones, of qtype mxfp8. XLA on a CPU makes
# amax / max a product. mxfp8 of 0.1.8, on PyPI, rounds up by log2.
_QWIX = ScalePolicy(name="qwix", ratio="amax*(1/max)", stored="scale_inv", one_below=2.0**-63)

POLICIES = {
    p.name: p
    for p in (
        _TORCHAO,
        dataclasses.replace(_TORCHAO, name="torchao_pow2", power_of_two="exp2_log2"),
        dataclasses.replace(_TORCHAO, name="torchao_mask", power_of_two="mask"),
        _TE_CURRENT,
        _TE_DELAYED,
        dataclasses.replace(_TE_CURRENT, name="te_block", power_of_two="mask"),
        _FLAX,
        dataclasses.replace(_FLAX, name="flax_bf16", compute=BFLOAT16),
        _MSAMP,
        _MX_FLOOR,
        dataclasses.replace(_MX_FLOOR, name="mx_ceil", ratio="exponents_up"),
        dataclasses.replace(_MX_FLOOR, name="mx_even", ratio="exponents_even"),
        _MX_RCEIL,
        # TransformerEngine, common/util/ptx.cuh: float_to_e8m0, exp2f_rcp (commit 03198ae1): the
        # exact round-up. From v2.13 on (commit 28777046) a scale_inv of 2^-127 has scale 2^127.
        dataclasses.replace(_MX_RCEIL, name="te_mxfp8", power_of_two="mask"),
        dataclasses.replace(
            _MX_RCEIL, name="te_mxfp8_2.13", power_of_two="mask", e8m0=E8M0Rule(scale_of_code_0=2.0**127, scale_of_nan="nan")
        ),
        _TE_BLOCK_BF16,
        _DEEPGEMM,
        dataclasses.replace(_DEEPGEMM, name="deepgemm_cpu", ratio="amax/max"),
        # ceil_to_ue8m0 of the same file: the exact round-up, of a NaN too. The eps leaves no code 0.
        dataclasses.replace(
            _DEEPGEMM,
            name="deepgemm_ue8m0",
            power_of_two="mask",
            e8m0=E8M0Rule(scale_of_code_0=2.0**127, scale_of_nan="as_infinite"),
        ),
        _SGLANG,
        _ADAMW_FP8,
        _DEEPSEEK,
        _VLLM,
        dataclasses.replace(_DEEPSEEK, name="deepseek_v3_2024", eps=0.0),
        dataclasses.replace(_DEEPSEEK, name="deepseek_v3_ue8m0", power_of_two="exp2_log2"),
        _MICROXCALING,
        dataclasses.replace(_MICROXCALING, name="gfloat", e8m0=E8M0Rule(scale_of_code_0=2.0**127, scale_of_nan="nan")),
        _QWIX,
        dataclasses.replace(_QWIX, name="qwix_bf16", compute=BFLOAT16, scale_dtype=BFLOAT16),
        dataclasses.replace(_QWIX, name="qwix_mx", factor=60 / 31, scale_dtype=BFLOAT16, power_of_two="cut"),
        dataclasses.replace(_QWIX, name="qwix_mx_0.1.8", power_of_two="exp2_log2"),
    )
}
"""The scale policies by name (S-3, S-4, S-9 to S-15, S-17, S-20)."""


UNSCALED = ScalePolicy(name="unscaled", ratio="one")
"""A cast without a scale (S-21): what a rule of a config names to show why scales are needed. Not among
``POLICIES``, which are those of libraries."""

FP4_POLICIES = {
    p.name: p
    for p in (
        # TransformerEngine, common/cast/nvfp4/core_nvfp4.cuh: compute_global_encode_scaling_factor_FP4,
        # quantization_and_transposition_SF::compute_decoding_scaling_factor (commit d0067d0d).
        ScalePolicy(name="te_nvfp4", two_level=TwoLevel(tensor="encode")),
        # torchao 0.18, prototype/mx_formats/nvfp4_tensor.py: nvfp4_quantize, with per_tensor_scale of
        # per_tensor_amax_to_scale, and without. E4M3_EPS is torch's tiny of float8_e4m3fn.
        ScalePolicy(name="torchao_nvfp4", two_level=TwoLevel(tensor="decode", smallest=2.0**-6)),
        ScalePolicy(name="torchao_nvfp4_one_level", two_level=TwoLevel(tensor="none", smallest=2.0**-6)),
    )
}
"""The scale policies of 4-bit formats whose block scales are not a function of the block's amax alone, by
name (S-22). The simulator has them, and no backend. Not among ``POLICIES``, whose scales are made from
one amax; those of MX serve 4-bit formats too."""


def by_name(policy: "str | ScalePolicy") -> ScalePolicy:
    """The policy of that name; a ScalePolicy is itself; ValueError for anything else."""
    return registry.lookup("policy is a ScalePolicy or", POLICIES | FP4_POLICIES, policy, ScalePolicy)
