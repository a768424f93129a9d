"""AdamW whose moments are stored in FP8, for optax (spec O)."""

from fp8ref.jax.states.states import adamw, copies, decode, step, weights

__all__ = ["adamw", "copies", "decode", "step", "weights"]
