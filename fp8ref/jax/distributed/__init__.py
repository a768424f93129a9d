"""A linear on a mesh: placement, collectives, Explicit axes, gradients summed in FP8."""
