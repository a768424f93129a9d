"""A model of 3.3 million parameters for 2,000 steps under every kind of recipe, of three seeds.

Usage: python benchmarks/losses/larger_losses.py [--seeds 3] [--variants ...] [--show]

1 million bytes of the standard library's text. The runs take some hours on two cores; a stopped
command goes on where it was, and the JSON file holds every run that has ended.
"""

import matched


def _variant(recipe: str, **numerics: object) -> dict:
    return {"numerics": {"recipe": recipe, **numerics}}


VARIANTS = {
    "bf16": _variant("bf16"),
    "tensorwise": _variant("tensorwise"),
    "rowwise": _variant("rowwise"),
    "delayed": _variant("delayed"),
    "mxfp8": _variant("mxfp8"),
    "nvfp4": _variant("nvfp4"),
    "states in FP8": _variant("tensorwise")
    | {"optimizer": {"kind": "adamw_states", "layout": "sqrt_e4m3"}},
    "attention in FP8": _variant("tensorwise", attention="cudnn"),
}
"""{variant: the sections that it changes}."""

STUDY = matched.Study(
    name="larger_losses",
    variants=VARIANTS,
    sections={
        "model": {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "data": {"sequence_length": 128, "batch_size": 4},
        "optimizer": {"learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup_steps": 50},
        "run": {"steps": 2000},
        "checkpoint": {"every": 500},
    },
    every=10,
)

if __name__ == "__main__":
    matched.main(STUDY, __doc__.splitlines()[0], backend="jax")
