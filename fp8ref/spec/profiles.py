"""Profiles as data: what a library, in a range of versions, does, in the specification's names.

docs/spec/profiles.md states them and differences. ``policy_profiles``: libraries of a policy.
"""

import functools
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from fp8ref.shared import registry

Known = Literal["run", "transcribed", "read"]
"""How a profile is known.

run          the library, called by the tests or by docs/scripts/libraries.py.
transcribed  its steps, written again (``conformance.transcriptions``, or tests), and compared.
read         its source alone.
"""


_LAYERS = "model_executor/layers/quantization/"
_GROUPS = "csrc/quantization/w8a8/fp8/per_token_group_quant.cu"
_SGL_KERNEL = "sgl-project/sglang sgl-kernel/csrc/gemm/"
_MODELOPT = "NVIDIA/Model-Optimizer modelopt/torch/quantization/qtensor/"
_TE_COMMON = "NVIDIA/TransformerEngine transformer_engine/common/"

SOURCES = {
    "torchao-0.18": (
        "torchao 0.18 float8/float8_utils.py",
        "torchao 0.18 float8/float8_training_tensor.py",
    ),
    "ocp-mx-torchao": ("torchao 0.18 prototype/mx_formats/mx_tensor.py",),
    "torchao-adamw-fp8": ("torchao 0.18 optim/subclass_fp8.py",),
    "torch-2.11": ("torchao 0.18 float8/float8_utils.py",),
    "torch-2.12": ("torch 2.13",),
    "jax": ("jax 0.10.2",),
    "ml_dtypes": ("ml_dtypes 0.6.0",),
    "flax-0.12.8": ("flax 0.12.8 linen/fp8_ops.py",),
    "qwix": ("google/qwix qwix/_src/core/qarray.py aa623acb",),
    "qwix-0.1.8": ("qwix 0.1.8 (PyPI) qwix/_src/core/qarray.py",),
    "tokamax-0.0.12": (
        "tokamax 0.0.12 (PyPI) tokamax/_src/ops/ragged_dot/pallas_triton.py",
        "tokamax 0.0.12 (PyPI) tokamax/_src/ops/ragged_dot/pallas_mosaic_gpu.py",
    ),
    "te-current": (f"{_TE_COMMON}recipe/recipe_common.cuh d0067d0d",),
    "te-delayed": (f"{_TE_COMMON}recipe/delayed_scaling.cu 6b71a0ad",),
    "te-block": (f"{_TE_COMMON}recipe/recipe_common.cuh d0067d0d",),
    "te-mxfp8": (f"{_TE_COMMON}util/ptx.cuh 5671fd36",),
    "te-mxfp8-2.13": (
        f"{_TE_COMMON}util/ptx.cuh 28777046",
        f"{_TE_COMMON}cast/mxfp8/quantize_mxfp8.cuh d0067d0d",
    ),
    "ms-amp": ("Azure/MS-AMP msamp/common/tensor/meta.py 0367bdc5",),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3 inference/kernel.py 9b4e9788",),
    "deepseek-v3-2024": ("deepseek-ai/DeepSeek-V3 inference/kernel.py 06231633",),
    "deepgemm": ("deepseek-ai/DeepGEMM deep_gemm/utils/math.py 54e22612",),
    "vllm": (
        f"vllm-project/vllm vllm/{_LAYERS}utils/fp8_utils.py 007d5005",
        f"vllm-project/vllm vllm/{_LAYERS}input_quant_fp8.py 014af6b5",
        "vllm-project/vllm csrc/quantization/w8a8/fp8/common.cu 096d3dc9",
        f"vllm-project/vllm {_GROUPS} 0f5257e2",
    ),
    "sglang": (
        "sgl-project/sglang python/sglang/srt/layers/quantization/fp8_kernel.py 008601fa",
        f"{_SGL_KERNEL}per_token_group_quant_8bit_v2.cu 037cd6ea",
        f"{_SGL_KERNEL}per_token_quant_fp8.cu 0490047f",
        f"{_SGL_KERNEL}per_tensor_quant_fp8.cu 28f9412d",
    ),
    "slime": (
        "THUDM/slime slime/backends/megatron_utils/kernels/fp8_kernel.py 624b824a",
        "THUDM/slime tools/convert_hf_to_fp8.py 624b824a",
    ),
    "miles": (
        "radixark/miles miles/utils/fp8_kernel.py 31f1ca96",
        "radixark/miles tools/convert_hf_to_fp8.py 31f1ca96",
    ),
    "verl": ("verl-project/verl verl/utils/kernel/fp8_kernel.py 1dda039b",),
    "transformers-5.23": (
        "transformers 5.23 (PyPI) integrations/finegrained_fp8.py",
        "huggingface/kernels-community finegrained-fp8/torch-ext/finegrained_fp8/"
        "act_quant.py 46fa5522",
    ),
    "flashinfer": (
        "flashinfer-ai/flashinfer flashinfer/fused_moe/prepare.py fb28d724",
        "flashinfer-ai/flashinfer flashinfer/testing/utils.py fb28d724",
    ),
    "compressed-tensors": (
        "vllm-project/compressed-tensors "
        "src/compressed_tensors/quantization/utils/helpers.py ac8e2ba8",
    ),
    "modelopt": (f"{_MODELOPT}fp8_tensor.py a2fbac7b", f"{_MODELOPT}mxfp8_tensor.py a2fbac7b"),
    "torchao-0.19": ("pytorch/ao torchao/prototype/mx_formats/mx_tensor.py 36027d82",),
    "microxcaling": ("microsoft/microxcaling mx/mx_ops.py 3b429a84",),
    "gfloat-0.5": ("gfloat 0.5.2 block.py", "gfloat 0.5.2 round_ndarray.py"),
    "torchao-nvfp4": ("torchao 0.18 prototype/mx_formats/nvfp4_tensor.py",),
    "torchao-mxfp4": ("torchao 0.18 prototype/mx_formats/mx_tensor.py",),
    "te-nvfp4": (
        f"{_TE_COMMON}cast/nvfp4/core_nvfp4.cuh d0067d0d",
        "NVIDIA/TransformerEngine "
        "transformer_engine/pytorch/custom_recipes/reference_nvfp4.py d0067d0d",
    ),
    "te-nvfp4-4over6": (f"{_TE_COMMON}cast/nvfp4/quantize_4over6_nvfp4.cuh d0067d0d",),
    "te-nvfp4-row": (
        f"{_TE_COMMON}cast/nvfp4/quantize_transpose_nvfp4.cuh d0067d0d",
        f"{_TE_COMMON}cast/nvfp4/quantize_4over6_nvfp4.cuh d0067d0d",
        "NVIDIA/TransformerEngine transformer_engine/pytorch/cpp_extensions/gemm.py d0067d0d",
    ),
    "hip-fp8": ("ROCm/clr hipamd/include/hip/amd_detail/amd_hip_fp8.h 00387053",),
    "cuda-fp8": ("CUDA 13.0 include/cuda_fp8.hpp",),
}
"""{profile: repository, file and commit, or package, version and file, of each source}."""


@dataclass(frozen=True)
class Profile:
    """One library in one range of versions.

    policies  names of POLICIES or FP4_POLICIES; granularities: names of GRANULARITIES.
    cast      a behavior of C-8, after a clip where ``clipped``; None: not stated.
    bits      of the formats that tensors are cast to: 8, or 4 under simulation.
    """

    name: str
    versions: str
    policies: tuple[str, ...] = ()
    granularities: tuple[str, ...] = ()
    _: KW_ONLY
    library: str
    known: Known
    cast: str | None = None
    clipped: bool = False
    bits: int = 8

    @property
    def sources(self) -> tuple[str, ...]:
        """Its ``SOURCES``."""
        return SOURCES[self.name]


_TENSOR, _ROW, _MX = ("tensorwise",), ("rowwise",), ("mx_1x32",)
_LINES, _SQUARES = ("blockwise_1x128",), ("blockwise_128x128",)
_BLOCKS, _NVFP4 = _LINES + _SQUARES, ("nvfp4_1x16", "nvfp4_16x16")
_FOUR_OVER_SIX = tuple(f"te_nvfp4_4over6{end}" for end in ("", "_mse", "_fast", "_mse_fast"))
_MX_POLICIES = ("mx_floor", "mx_rceil", "mx_ceil", "mx_even")

_run = functools.partial(Profile, known="run")
_transcribed = functools.partial(Profile, known="transcribed")
_torchao = functools.partial(_run, library="torchao")
_torchao_clipped = functools.partial(_torchao, cast="saturating", clipped=True)
_te = functools.partial(_transcribed, library="Transformer Engine", cast="saturating")
_qwix = functools.partial(_transcribed, library="qwix", cast="jax", clipped=True)
_deepseek = functools.partial(_transcribed, library="DeepSeek-V3", cast="saturating")

_PROFILES = (
    _torchao_clipped("torchao-0.18", "0.16 to 0.18", ("torchao", "torchao_pow2"), _TENSOR + _ROW),
    _torchao_clipped("ocp-mx-torchao", "0.16 to 0.18", _MX_POLICIES, _MX),
    _torchao("torchao-adamw-fp8", "0.16 to 0.18", ("torchao_adamw_fp8",), cast="torch"),
    Profile("torch-2.11", "up to 2.11", library="torch", known="read", cast="torch_2.11"),
    _run("torch-2.12", "from 2.12", library="torch", cast="torch"),
    _run("jax", "0.10", library="jax", cast="jax"),
    _run("ml_dtypes", "0.6", library="ml_dtypes", cast="ml_dtypes"),
    _run(
        "flax-0.12.8",
        "0.12.8",
        ("flax", "flax_bf16"),
        _TENSOR,
        library="flax",
        cast="jax",
        clipped=True,
    ),
    _qwix("qwix", "2026", ("qwix", "qwix_bf16", "qwix_mx"), _TENSOR + _ROW + _MX),
    _qwix("qwix-0.1.8", "0.1.8", ("qwix", "qwix_bf16", "qwix_mx_0.1.8"), _TENSOR + _ROW + _MX),
    _run("tokamax-0.0.12", "0.0.12", (), _TENSOR + _ROW, library="tokamax"),
    _te("te-current", "2", ("te_current",), _TENSOR),
    _te("te-delayed", "2", ("te_delayed",), _TENSOR),
    _te("te-block", "2", ("te_block", "te_current", "te_block_unmasked_bf16"), _BLOCKS),
    _te("te-mxfp8", "before 2.13", ("te_mxfp8",), _MX),
    _te("te-mxfp8-2.13", "from 2.13", ("te_mxfp8_2.13",), ("mx_1x32", "mx_32x32")),
    _transcribed("ms-amp", "0.4", ("msamp",), _TENSOR, library="MS-AMP"),
    _deepseek("deepseek-v3", "from August 2025", ("deepseek_v3", "deepseek_v3_ue8m0"), _BLOCKS),
    _deepseek("deepseek-v3-2024", "before August 2025", ("deepseek_v3_2024",), _BLOCKS),
    _transcribed(
        "deepgemm",
        "54e2261",
        ("deepgemm", "deepgemm_cpu", "deepgemm_ue8m0"),
        _BLOCKS + _ROW,
        library="DeepGEMM",
        cast="torch",
    ),
    _transcribed(
        "vllm",
        "August 2026",
        ("vllm", "vllm_ue8m0", "vllm_ue8m0_cuda", "vllm_token", "vllm_native", "sglang_token"),
        _LINES + _ROW + _TENSOR,
        library="vLLM",
    ),
    _transcribed(
        "sglang",
        "August 2026",
        ("sglang", "vllm", "vllm_ue8m0", "sglang_cuda", "sglang_ue8m0", "sglang_token"),
        _LINES + _ROW + _TENSOR,
        library="SGLang",
    ),
    _transcribed(
        "slime", "624b824", ("sglang", "torchao_adamw_fp8"), _SQUARES + _ROW, library="slime"
    ),
    _transcribed(
        "miles",
        "31f1ca9",
        ("sglang", "deepseek_v3_2024", "torchao_adamw_fp8"),
        _SQUARES + _ROW,
        library="miles",
    ),
    _transcribed("verl", "1dda039", ("sglang", "verl_torch"), _SQUARES, library="verl"),
    _transcribed(
        "transformers-5.23",
        "5.23",
        ("transformers", "flashinfer"),
        _SQUARES + _LINES,
        library="transformers",
    ),
    _transcribed(
        "flashinfer",
        "0.6.18",
        ("flashinfer", "transformers", "deepseek_v3_ue8m0"),
        _BLOCKS + _TENSOR,
        library="flashinfer",
    ),
    _transcribed(
        "compressed-tensors",
        "0.20",
        ("compressed_tensors", "compressed_tensors_bf16"),
        _TENSOR + _ROW + _SQUARES,
        library="compressed-tensors",
    ),
    _transcribed(
        "modelopt",
        "0.47",
        ("deepseek_v3_2024", "modelopt_bf16", "modelopt_mx"),
        _TENSOR + _ROW + _SQUARES + _MX,
        library="ModelOpt",
    ),
    _transcribed(
        "torchao-0.19",
        "36027d8",
        tuple(f"{policy}_0.19" for policy in _MX_POLICIES),
        _MX,
        library="torchao 0.19",
    ),
    _transcribed("microxcaling", "3b429a8", ("microxcaling",), _MX, library="microxcaling"),
    _run("gfloat-0.5", "0.5.2", ("gfloat",), _MX, library="gfloat"),
    _torchao(
        "torchao-nvfp4", "0.18", ("torchao_nvfp4", "torchao_nvfp4_one_level"), _NVFP4[:1], bits=4
    ),
    _torchao("torchao-mxfp4", "0.18", _MX_POLICIES, _MX, bits=4),
    _te("te-nvfp4", "d0067d0", ("te_nvfp4",), _NVFP4, bits=4),
    _te("te-nvfp4-4over6", "d0067d0", _FOUR_OVER_SIX, _NVFP4, bits=4),
    _te("te-nvfp4-row", "d0067d0", ("te_nvfp4_row", "te_nvfp4_row_4over6"), _NVFP4[:1], bits=4),
    _transcribed("hip-fp8", "0038705", library="HIP"),
    _run("cuda-fp8", "12.8 to 13", library="CUDA", cast="saturating"),
)

PROFILES = {profile.name: profile for profile in _PROFILES}
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
