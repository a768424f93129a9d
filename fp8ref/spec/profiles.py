"""Profiles as data: what one library, in one range of versions, does, in the names of the
specification.

docs/spec/profiles.md states them with their differences. ``policy_profiles`` says which libraries a
policy is of.
"""

import functools
from dataclasses import dataclass
from typing import Literal

from fp8ref.shared import registry

Known = Literal["run", "transcribed", "read"]
"""How a profile is known.

run          the library, called by the tests or by docs/scripts/libraries.py.
transcribed  its steps, written again (``conformance.transcriptions``, or tests), and compared.
read         its source alone.
"""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One library in one range of versions.

    cast      a behavior of C-8, after a clip where ``clipped``; None: not stated.
    policies  names of POLICIES or FP4_POLICIES; granularities: names of GRANULARITIES.
    bits      of the formats that tensors are cast to: 8, or 4 under simulation.
    sources   repository, file and commit, or package, version and file.
    """

    name: str
    library: str
    versions: str
    known: Known
    sources: tuple[str, ...]
    cast: str | None = None
    clipped: bool = False
    policies: tuple[str, ...] = ()
    granularities: tuple[str, ...] = ()
    bits: int = 8


_torchao = functools.partial(Profile, library="torchao", known="run")
_te = functools.partial(
    Profile, library="Transformer Engine", known="transcribed", cast="saturating"
)
_engine = functools.partial(Profile, known="transcribed")
_LAYERS = "model_executor/layers/quantization/"
_GROUPS = "csrc/quantization/w8a8/fp8/per_token_group_quant.cu"
_SGL_KERNEL = "sgl-project/sglang sgl-kernel/csrc/gemm/"
_MODELOPT = "NVIDIA/Model-Optimizer modelopt/torch/quantization/qtensor/"
_TE_COMMON = "NVIDIA/TransformerEngine transformer_engine/common/"

PROFILES = {
    p.name: p
    for p in (
        _torchao(
            name="torchao-0.18",
            versions="0.16 to 0.18",
            cast="saturating",
            clipped=True,
            policies=("torchao", "torchao_pow2"),
            granularities=("tensorwise", "rowwise"),
            sources=(
                "torchao 0.18 float8/float8_utils.py",
                "torchao 0.18 float8/float8_training_tensor.py",
            ),
        ),
        _torchao(
            name="ocp-mx-torchao",
            versions="0.16 to 0.18",
            cast="saturating",
            clipped=True,
            policies=("mx_floor", "mx_rceil", "mx_ceil", "mx_even"),
            granularities=("mx_1x32",),
            sources=("torchao 0.18 prototype/mx_formats/mx_tensor.py",),
        ),
        _torchao(
            name="torchao-adamw-fp8",
            versions="0.16 to 0.18",
            cast="torch",
            policies=("torchao_adamw_fp8",),
            sources=("torchao 0.18 optim/subclass_fp8.py",),
        ),
        Profile(
            name="torch-2.11",
            library="torch",
            versions="up to 2.11",
            known="read",
            cast="torch_2.11",
            sources=("torchao 0.18 float8/float8_utils.py",),
        ),
        Profile(
            name="torch-2.12",
            library="torch",
            versions="from 2.12",
            known="run",
            cast="torch",
            sources=("torch 2.13",),
        ),
        Profile(
            name="jax",
            library="jax",
            versions="0.10",
            known="run",
            cast="jax",
            sources=("jax 0.10.2",),
        ),
        Profile(
            name="ml_dtypes",
            library="ml_dtypes",
            versions="0.6",
            known="run",
            cast="ml_dtypes",
            sources=("ml_dtypes 0.6.0",),
        ),
        Profile(
            name="flax-0.12.8",
            library="flax",
            versions="0.12.8",
            known="run",
            cast="jax",
            clipped=True,
            policies=("flax", "flax_bf16"),
            granularities=("tensorwise",),
            sources=("flax 0.12.8 linen/fp8_ops.py",),
        ),
        Profile(
            name="qwix",
            library="qwix",
            versions="2026",
            known="transcribed",
            cast="jax",
            clipped=True,
            policies=("qwix", "qwix_bf16", "qwix_mx"),
            granularities=("tensorwise", "rowwise", "mx_1x32"),
            sources=("google/qwix qwix/_src/core/qarray.py aa623acb",),
        ),
        Profile(
            name="qwix-0.1.8",
            library="qwix",
            versions="0.1.8",
            known="transcribed",
            cast="jax",
            clipped=True,
            policies=("qwix", "qwix_bf16", "qwix_mx_0.1.8"),
            granularities=("tensorwise", "rowwise", "mx_1x32"),
            sources=("qwix 0.1.8 (PyPI) qwix/_src/core/qarray.py",),
        ),
        Profile(
            name="tokamax-0.0.12",
            library="tokamax",
            versions="0.0.12",
            known="run",
            granularities=("tensorwise", "rowwise"),
            sources=(
                "tokamax 0.0.12 (PyPI) tokamax/_src/ops/ragged_dot/pallas_triton.py",
                "tokamax 0.0.12 (PyPI) tokamax/_src/ops/ragged_dot/pallas_mosaic_gpu.py",
            ),
        ),
        _te(
            name="te-current",
            versions="2",
            policies=("te_current",),
            granularities=("tensorwise",),
            sources=(f"{_TE_COMMON}recipe/recipe_common.cuh d0067d0d",),
        ),
        _te(
            name="te-delayed",
            versions="2",
            policies=("te_delayed",),
            granularities=("tensorwise",),
            sources=(f"{_TE_COMMON}recipe/delayed_scaling.cu 6b71a0ad",),
        ),
        _te(
            name="te-block",
            versions="2",
            policies=("te_block", "te_current", "te_block_unmasked_bf16"),
            granularities=("blockwise_1x128", "blockwise_128x128"),
            sources=(f"{_TE_COMMON}recipe/recipe_common.cuh d0067d0d",),
        ),
        _te(
            name="te-mxfp8",
            versions="before 2.13",
            policies=("te_mxfp8",),
            granularities=("mx_1x32",),
            sources=(f"{_TE_COMMON}util/ptx.cuh 5671fd36",),
        ),
        _te(
            name="te-mxfp8-2.13",
            versions="from 2.13",
            policies=("te_mxfp8_2.13",),
            granularities=("mx_1x32", "mx_32x32"),
            sources=(
                f"{_TE_COMMON}util/ptx.cuh 28777046",
                f"{_TE_COMMON}cast/mxfp8/quantize_mxfp8.cuh d0067d0d",
            ),
        ),
        Profile(
            name="ms-amp",
            library="MS-AMP",
            versions="0.4",
            known="transcribed",
            policies=("msamp",),
            granularities=("tensorwise",),
            sources=("Azure/MS-AMP msamp/common/tensor/meta.py 0367bdc5",),
        ),
        Profile(
            name="deepseek-v3",
            library="DeepSeek-V3",
            versions="from August 2025",
            known="transcribed",
            cast="saturating",
            policies=("deepseek_v3", "deepseek_v3_ue8m0"),
            granularities=("blockwise_1x128", "blockwise_128x128"),
            sources=("deepseek-ai/DeepSeek-V3 inference/kernel.py 9b4e9788",),
        ),
        Profile(
            name="deepseek-v3-2024",
            library="DeepSeek-V3",
            versions="before August 2025",
            known="transcribed",
            cast="saturating",
            policies=("deepseek_v3_2024",),
            granularities=("blockwise_1x128", "blockwise_128x128"),
            sources=("deepseek-ai/DeepSeek-V3 inference/kernel.py 06231633",),
        ),
        Profile(
            name="deepgemm",
            library="DeepGEMM",
            versions="54e2261",
            known="transcribed",
            cast="torch",
            policies=("deepgemm", "deepgemm_cpu", "deepgemm_ue8m0"),
            granularities=("blockwise_1x128", "blockwise_128x128", "rowwise"),
            sources=("deepseek-ai/DeepGEMM deep_gemm/utils/math.py 54e22612",),
        ),
        _engine(
            name="vllm",
            library="vLLM",
            versions="August 2026",
            policies=(
                "vllm",
                "vllm_ue8m0",
                "vllm_ue8m0_cuda",
                "vllm_token",
                "vllm_native",
                "sglang_token",
            ),
            granularities=("blockwise_1x128", "rowwise", "tensorwise"),
            sources=(
                f"vllm-project/vllm vllm/{_LAYERS}utils/fp8_utils.py 007d5005",
                f"vllm-project/vllm vllm/{_LAYERS}input_quant_fp8.py 014af6b5",
                "vllm-project/vllm csrc/quantization/w8a8/fp8/common.cu 096d3dc9",
                f"vllm-project/vllm {_GROUPS} 0f5257e2",
            ),
        ),
        _engine(
            name="sglang",
            library="SGLang",
            versions="August 2026",
            policies=(
                "sglang",
                "vllm",
                "vllm_ue8m0",
                "sglang_cuda",
                "sglang_ue8m0",
                "sglang_token",
            ),
            granularities=("blockwise_1x128", "rowwise", "tensorwise"),
            sources=(
                "sgl-project/sglang python/sglang/srt/layers/quantization/fp8_kernel.py 008601fa",
                f"{_SGL_KERNEL}per_token_group_quant_8bit_v2.cu 037cd6ea",
                f"{_SGL_KERNEL}per_token_quant_fp8.cu 0490047f",
                f"{_SGL_KERNEL}per_tensor_quant_fp8.cu 28f9412d",
            ),
        ),
        _engine(
            name="slime",
            library="slime",
            versions="624b824",
            policies=("sglang", "torchao_adamw_fp8"),
            granularities=("blockwise_128x128", "rowwise"),
            sources=(
                "THUDM/slime slime/backends/megatron_utils/kernels/fp8_kernel.py 624b824a",
                "THUDM/slime tools/convert_hf_to_fp8.py 624b824a",
            ),
        ),
        _engine(
            name="miles",
            library="miles",
            versions="31f1ca9",
            policies=("sglang", "deepseek_v3_2024", "torchao_adamw_fp8"),
            granularities=("blockwise_128x128", "rowwise"),
            sources=(
                "radixark/miles miles/utils/fp8_kernel.py 31f1ca96",
                "radixark/miles tools/convert_hf_to_fp8.py 31f1ca96",
            ),
        ),
        _engine(
            name="verl",
            library="verl",
            versions="1dda039",
            policies=("sglang", "verl_torch"),
            granularities=("blockwise_128x128",),
            sources=("verl-project/verl verl/utils/kernel/fp8_kernel.py 1dda039b",),
        ),
        _engine(
            name="transformers-5.23",
            library="transformers",
            versions="5.23",
            policies=("transformers", "flashinfer"),
            granularities=("blockwise_128x128", "blockwise_1x128"),
            sources=(
                "transformers 5.23 (PyPI) integrations/finegrained_fp8.py",
                "huggingface/kernels-community finegrained-fp8/torch-ext/finegrained_fp8/"
                "act_quant.py 46fa5522",
            ),
        ),
        _engine(
            name="flashinfer",
            library="flashinfer",
            versions="0.6.18",
            policies=("flashinfer", "transformers", "deepseek_v3_ue8m0"),
            granularities=("blockwise_1x128", "blockwise_128x128", "tensorwise"),
            sources=(
                "flashinfer-ai/flashinfer flashinfer/fused_moe/prepare.py fb28d724",
                "flashinfer-ai/flashinfer flashinfer/testing/utils.py fb28d724",
            ),
        ),
        _engine(
            name="compressed-tensors",
            library="compressed-tensors",
            versions="0.20",
            policies=("compressed_tensors", "compressed_tensors_bf16"),
            granularities=("tensorwise", "rowwise", "blockwise_128x128"),
            sources=(
                "vllm-project/compressed-tensors "
                "src/compressed_tensors/quantization/utils/helpers.py ac8e2ba8",
            ),
        ),
        _engine(
            name="modelopt",
            library="ModelOpt",
            versions="0.47",
            policies=("deepseek_v3_2024", "modelopt_bf16", "modelopt_mx"),
            granularities=("tensorwise", "rowwise", "blockwise_128x128", "mx_1x32"),
            sources=(f"{_MODELOPT}fp8_tensor.py a2fbac7b", f"{_MODELOPT}mxfp8_tensor.py a2fbac7b"),
        ),
        _engine(
            name="torchao-0.19",
            library="torchao 0.19",
            versions="36027d8",
            policies=("mx_floor_0.19", "mx_rceil_0.19", "mx_ceil_0.19", "mx_even_0.19"),
            granularities=("mx_1x32",),
            sources=("pytorch/ao torchao/prototype/mx_formats/mx_tensor.py 36027d82",),
        ),
        Profile(
            name="microxcaling",
            library="microxcaling",
            versions="3b429a8",
            known="transcribed",
            policies=("microxcaling",),
            granularities=("mx_1x32",),
            sources=("microsoft/microxcaling mx/mx_ops.py 3b429a84",),
        ),
        Profile(
            name="gfloat-0.5",
            library="gfloat",
            versions="0.5.2",
            known="run",
            policies=("gfloat",),
            granularities=("mx_1x32",),
            sources=("gfloat 0.5.2 block.py", "gfloat 0.5.2 round_ndarray.py"),
        ),
        _torchao(
            name="torchao-nvfp4",
            versions="0.18",
            bits=4,
            policies=("torchao_nvfp4", "torchao_nvfp4_one_level"),
            granularities=("nvfp4_1x16",),
            sources=("torchao 0.18 prototype/mx_formats/nvfp4_tensor.py",),
        ),
        _torchao(
            name="torchao-mxfp4",
            versions="0.18",
            policies=("mx_floor", "mx_rceil", "mx_ceil", "mx_even"),
            granularities=("mx_1x32",),
            sources=("torchao 0.18 prototype/mx_formats/mx_tensor.py",),
            bits=4,
        ),
        _te(
            name="te-nvfp4",
            versions="d0067d0",
            bits=4,
            policies=("te_nvfp4",),
            granularities=("nvfp4_1x16", "nvfp4_16x16"),
            sources=(
                f"{_TE_COMMON}cast/nvfp4/core_nvfp4.cuh d0067d0d",
                "NVIDIA/TransformerEngine "
                "transformer_engine/pytorch/custom_recipes/reference_nvfp4.py d0067d0d",
            ),
        ),
        _te(
            name="te-nvfp4-4over6",
            versions="d0067d0",
            bits=4,
            policies=("te_nvfp4_4over6", "te_nvfp4_4over6_mse"),
            granularities=("nvfp4_1x16", "nvfp4_16x16"),
            sources=(f"{_TE_COMMON}cast/nvfp4/quantize_4over6_nvfp4.cuh d0067d0d",),
        ),
        Profile(
            name="hip-fp8",
            library="HIP",
            versions="0038705",
            known="transcribed",
            sources=("ROCm/clr hipamd/include/hip/amd_detail/amd_hip_fp8.h 00387053",),
        ),
        Profile(
            name="cuda-fp8",
            library="CUDA",
            versions="12.8 to 13",
            known="run",
            cast="saturating",
            sources=("CUDA 13.0 include/cuda_fp8.hpp",),
        ),
    )
}
"""The profiles by name, in the order of docs/spec/profiles.md."""


def by_name(profile: "str | Profile") -> Profile:
    """The profile of that name; a Profile is itself; ValueError for anything else."""
    return registry.lookup("profile is a Profile or", PROFILES, profile, Profile)


def policy_profiles(policy: str, bits: int = 8) -> list[str]:
    """The names of the profiles that have a policy for formats of so many bits; empty if none has.

    >>> policy_profiles("te_mxfp8_2.13"), policy_profiles("mx_floor", 4)
    (['te-mxfp8-2.13'], ['torchao-mxfp4'])
    """
    return [
        name
        for name, profile in PROFILES.items()
        if policy in profile.policies and profile.bits == bits
    ]
