"""Faults of decoders of e4m3: subnormal numbers, NaN and the bias."""

import numpy as np
from museum import ask
from museum.arithmetic import F
from museum.decoders import e4m3, e4m3_all_normal, e4m3fnuz, fields
from museum.exhibit import Exhibit


def hidden_one(codes):
    """Zeros and NaNs are guarded; all other codes have the implicit one."""
    magnitude = np.asarray(codes) & 127
    numbers = np.where(magnitude == 0, F(0), e4m3_all_normal(codes))
    return np.where(magnitude == 127, F(np.nan), numbers)


def nan_of_fnuz(codes):
    """0x80 is NaN, as in e4m3fnuz, and 0x7F and 0xFF are numbers."""
    sign, exponent, fraction = fields(codes, 3)
    normal = (1 + fraction) * 2.0 ** (exponent - 7)
    magnitude = np.where(exponent == 0, fraction * 2.0**-6, normal)
    return np.where(np.asarray(codes) == 0x80, F(np.nan), (sign * magnitude).astype(F))


EXHIBITS = (
    Exhibit(
        name="aidotnet-tensors-801",
        link="https://github.com/ooples/AiDotNet.Tensors/pull/801",
        library="AiDotNet (Metal)",
        year=2026,
        title="Subnormal numbers have the implicit one",
        fault=hidden_one,
        twin=e4m3,
        ask=ask.decoder("e4m3fn"),
        named="subnormal codes of e4m3fn are read as normal numbers",
    ),
    Exhibit(
        name="rocm-libraries-5792",
        link="https://github.com/ROCm/rocm-libraries/pull/5792",
        library="hipBLASLt",
        year=2026,
        title="The NaN of OCP's e4m3 is looked for at FNUZ's code",
        fault=nan_of_fnuz,
        twin=e4m3,
        ask=ask.decoder("e4m3fn"),
        named="-0 of e4m3fn is taken for NaN and NaN of e4m3fn is taken for numbers",
    ),
    Exhibit(
        name="amdmigraphx-3684",
        link="https://github.com/ROCm/AMDMIGraphX/pull/3684",
        library="MIGraphX",
        year=2024,
        title="OCP's codes are read as FNUZ: numbers are half as large",
        fault=e4m3fnuz,
        twin=e4m3,
        ask=ask.decoder("e4m3fn"),
        named="codes of e4m3fn are read as e4m3fnuz",
    ),
)
