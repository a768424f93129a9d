"""AdamW whose moments are stored in FP8, as a torch optimizer (spec O)."""

from fp8ref.torch.states.states import AdamW, decode, set_weight, weight

__all__ = ["AdamW", "decode", "set_weight", "weight"]
