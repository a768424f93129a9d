"""FSDP2 and tensor parallelism with FP8: gathers, cuts, gradients summed in FP8."""
