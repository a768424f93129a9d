"""FP8 GEMMs on a CPU without oneDNN's reference kernel.

For tensorwise e4m3 x e4m3 on processors without FP8 instructions, torch's ``_scaled_mm`` picks a oneDNN kernel that is a plain
loop: 4.6 s for 2048 x 128 x 384, where torch's own kernel takes 2 ms (torch 2.13). Both stay within SEMANTICS B-1.
"""

import functools
import warnings

import torch


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


@functools.cache
def _library() -> torch.library.Library:
    """Kept for the life of the process: the registration ends with it."""
    return torch.library.Library("aten", "IMPL", "CPU")
