"""FP8 GEMMs on a CPU: which there are, and without oneDNN's reference kernel.

For tensorwise e4m3 x e4m3 on processors without FP8 instructions, torch's ``_scaled_mm`` picks a oneDNN kernel that is a plain
loop: 4.6 s for 2048 x 128 x 384, where torch's own kernel takes 2 ms (torch 2.13). Both stay within SEMANTICS B-1.
"""

import functools
import warnings

import torch

from fp8ref.recipe import Recipe


@functools.cache
def use_native_scaled_mm() -> None:
    """From now on, in this process, ``torch._scaled_mm`` on a CPU runs with oneDNN switched off for the call. Idempotent.

    Where torch cannot look a kernel up (before 2.9), nothing changes but the speed that is missed.
    """
    if not hasattr(torch.library, "get_kernel"):
        return
    kernel = torch.library.get_kernel("aten::_scaled_mm", "CPU")

    def without_onednn(keyset, *args, **kwargs):
        enabled = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        try:
            return kernel.call_boxed(keyset, *args, **kwargs)
        finally:
            torch.backends.mkldnn.enabled = enabled

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        _library().impl("_scaled_mm", without_onednn, "CPU", with_keyset=True)


def check(recipe: Recipe) -> None:
    """ValueError for a recipe with a GEMM that this torch does not have on a CPU: with scales of rows before 2.13."""
    if any(spec.rowwise and spec.epilogue == "scale_then_round" for spec in recipe.gemms.values()) and not _multiplies_rows():
        raise ValueError(
            f"recipe {recipe.name!r} scales by rows, which torch {torch.__version__} multiplies on a GPU alone. Move the model there first, "
            "install torch 2.13, or use recipe 'tensorwise'."
        )


@functools.cache
def _multiplies_rows() -> bool:
    codes, scale = torch.zeros(16, 16, dtype=torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@functools.cache
def _library() -> torch.library.Library:
    """Kept for the life of the process: the registration ends with it."""
    return torch.library.Library("aten", "IMPL", "CPU")
