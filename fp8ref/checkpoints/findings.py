"""What an audit says: each kind of finding, its likely cause and the remedy, in plain words."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["KINDS", "Finding", "Kind"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of finding. ``alarm``: the bytes contradict each other or the config; else a note,
    which a right checkpoint may have too."""

    cause: str
    remedy: str
    alarm: bool = True


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A finding of one tensor, or of the checkpoint (tensor "").

    what      the contradiction, a sentence.
    evidence  the smallest place that shows it: block, code, scale.
    cause     the likely cause; by default of the kind.
    """

    kind: str
    tensor: str
    what: str
    evidence: dict[str, Any] = field(default_factory=dict)
    cause: str = ""

    @property
    def alarm(self) -> bool:
        return KINDS[self.kind].alarm

    def to_dict(self) -> dict[str, Any]:
        kind = KINDS[self.kind]
        return {
            "kind": self.kind,
            "alarm": kind.alarm,
            "tensor": self.tensor,
            "what": self.what,
            "evidence": self.evidence,
            "cause": self.cause or kind.cause,
            "remedy": kind.remedy,
        }


_AGAIN = "Quantize this weight again from its high-precision original."

KINDS = {
    "nan_codes": Kind(cause="the weight was NaN, or its scale was 0 or NaN", remedy=_AGAIN),
    "infinite_codes": Kind(cause="the cast to e5m2 did not saturate", remedy=_AGAIN),
    "nan_scale": Kind(cause="the block had a NaN or an infinite weight", remedy=_AGAIN),
    "infinite_scale": Kind(cause="the scale overflowed, or is the reciprocal of 0", remedy=_AGAIN),
    "zero_scale": Kind(
        cause="the scale underflowed, or was not written: the whole block becomes 0", remedy=_AGAIN
    ),
    "negative_scale": Kind(
        cause="the scale is not an amax: bytes of another dtype, or damage", remedy=_AGAIN
    ),
    "scale_shape": Kind(
        cause="other blocks than the codes were made with, a padded or a packed layout",
        remedy="Store a scale for each block, in the order of the blocks.",
    ),
    "scale_packed": Kind(
        cause="packed e8m0 scales, four in 32 bits, are stored as plain numbers",
        remedy="Unpack the scales, or store them as int32 in the layout of their engine.",
    ),
    "scale_exponents": Kind(
        cause="e8m0 codes were converted to numbers, and not to powers of two",
        remedy="Store 2^(code - 127), or the codes as float8_e8m0fnu.",
    ),
    "scale_inverse": Kind(
        cause="the multiplier into FP8 is stored where the factor out of it belongs",
        remedy="Store the reciprocal, or mend the name: weight_scale multiplies out of FP8.",
    ),
    "code_below": Kind(
        cause="a stale or a merged scale, or the scale of another block", remedy=_AGAIN
    ),
    "code_near": Kind(
        cause="codes that were adjusted after scaling, such as by GPTQ, or a scale that is shared",
        remedy="None is needed if codes were adjusted on purpose.",
        alarm=False,
    ),
    "rounded_after": Kind(
        cause="scales were rounded to powers of two after the codes were made: weights are up to "
        "twice too large",
        remedy="Round the scale first, and make the codes with the rounded scale.",
    ),
    "not_power_of_two": Kind(
        cause="single scales were merged, averaged or stored in another dtype", remedy=_AGAIN
    ),
    "clipped": Kind(
        cause="the scale is too small for the block: large weights were clipped", remedy=_AGAIN
    ),
    "clipped_4_bits": Kind(
        cause="the quantizer clips on purpose, or the scale is too small", remedy="", alarm=False
    ),
    "arrangement": Kind(
        cause="scales in another order than the codes",
        remedy="Store the scales in the order of the blocks.",
    ),
    "unrelated": Kind(
        cause="scales of another weight, stale ones, or blocks that were reordered after "
        "quantizing",
        remedy=_AGAIN,
    ),
    "tensor_scale": Kind(
        cause="a stale or calibrated scale of the tensor, or another tensor's", remedy=_AGAIN
    ),
    "codes_alone": Kind(
        cause="the scale was not saved, or under another name",
        remedy="Save the scale beside the codes; without it they are no weights.",
    ),
    "scale_alone": Kind(
        cause="the weight was left in high precision, or its codes were not saved",
        remedy="Remove the scale, or save the codes.",
    ),
    "not_a_linear": Kind(
        cause="a filter converted every parameter: engines expect this one in high precision",
        remedy="Leave it in high precision, and name it in the config.",
    ),
    "index": Kind(
        cause="a shard is missing or of another export", remedy="Copy the files of one export."
    ),
    "config_missing": Kind(
        cause="config.json was copied from the high-precision checkpoint",
        remedy="Add quantization_config: without it engines load codes as numbers.",
    ),
    "config_alone": Kind(
        cause="the config of a quantized checkpoint beside weights in high precision",
        remedy="Remove quantization_config, or quantize the weights.",
    ),
    "config_format": Kind(
        cause="the config of another export", remedy="Make config and codes say the same."
    ),
    "config_blocks": Kind(
        cause="the config of another export, or scales of other blocks",
        remedy="Make config and scales say the same.",
    ),
    "config_scale": Kind(
        cause="scales were not rounded as the config says: engines that need powers of two "
        "round them, after the codes",
        remedy="Quantize again with rounded scales, or change the config.",
    ),
    "excluded": Kind(
        cause="a pattern of the config excludes more than was meant, or was not applied",
        remedy="Leave the weight in high precision, or narrow the pattern.",
    ),
    "left_out": Kind(
        cause="a pattern kept it in high precision when quantizing, and the config does not say so",
        remedy="Quantize it, or name it in the config: engines look for codes and a scale.",
    ),
    "not_named": Kind(
        cause="no layer of this name is quantized, and no pattern excludes it",
        remedy="Name it in the config, if its engine makes it a linear.",
        alarm=False,
    ),
    "pattern_engines": Kind(
        cause="engines match this pattern in different ways",
        remedy="Write the full names of the modules.",
        alarm=False,
    ),
    "fused_mixed": Kind(
        cause="engines hold these weights in one tensor, of one precision",
        remedy="Quantize all of them, or none.",
    ),
    "fused_scales": Kind(
        cause="engines hold these weights in one tensor with one scale, and take the largest",
        remedy="Quantize them with one scale of the tensor, from their common amax.",
    ),
    "fused_requantized": Kind(
        cause="engines hold these weights in one tensor with one scale, and quantize again",
        remedy="Quantize them with one scale to avoid a second rounding.",
        alarm=False,
    ),
    "not_audited": Kind(cause="blocks of this size are not among fp8ref's", remedy="", alarm=False),
    "original_missing": Kind(
        cause="the originals are of another model, or under other names",
        remedy="Name the directory of the checkpoint that was quantized.",
    ),
    "original_differs": Kind(
        cause="another rule, another source dtype, or weights that changed after quantizing",
        remedy=_AGAIN,
    ),
}
"""Kinds of findings by name."""
