"""AdamW whose moments are stored in FP8, for optax (spec O)."""

from fp8ref.jax.states.states import AdamW, Parameters, adamw, copies, decode, step, weights

__all__ = ["AdamW", "Parameters", "adamw", "copies", "decode", "step", "weights"]
