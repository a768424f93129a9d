"""What 4 bits cost in loss, and what each part of NVFP4 training saves.

Usage: python benchmarks/losses/nvfp4_losses.py [--seeds 3] [--variants ...] [--runs DIR] [--show]

Each variant is judged by bf16, and those without one part of ``nvfp4`` by ``nvfp4`` too, with the
verdict of ``fp8ref compare``. Parts are left out by rules of the config.
"""

import matched
from fp8ref.selection.rules import Rule

BLOCKS = ("layers",)


def _variant(recipe: str, *rules: Rule) -> dict:
    return {"numerics": {"recipe": recipe, "rules": rules or None}}


VARIANTS = {
    "bf16": _variant("bf16"),
    "mxfp8": _variant("mxfp8"),
    "mxfp4": _variant("mxfp4"),
    "nvfp4": _variant("nvfp4"),
    "no rotation": _variant("nvfp4", Rule(layers=BLOCKS, gemms=("grad_weight",), rotation="none")),
    "gradients to nearest": _variant(
        "nvfp4", Rule(layers=BLOCKS, roles=("grad_output",), rounding="nearest_even")
    ),
    "weights in rows of 16": _variant(
        "nvfp4", Rule(layers=BLOCKS, roles=("weight",), granularity="nvfp4_1x16")
    ),
    "last block in bf16": _variant("nvfp4", Rule(layers=("layers.1",), recipe="bf16")),
    "8 random bits": _variant(
        "nvfp4", Rule(layers=BLOCKS, roles=("grad_output",), rounding="stochastic_8")
    ),
    "four over six": _variant("nvfp4", Rule(layers=BLOCKS, policy="te_nvfp4_4over6")),
}
"""{variant: its recipe, and the rules that change it}."""

STUDY = matched.Study(
    name="nvfp4_losses", variants=VARIANTS, whole="nvfp4", parts=tuple(VARIANTS)[4:]
)

if __name__ == "__main__":
    matched.main(STUDY, __doc__.splitlines()[0], backend="jax")
