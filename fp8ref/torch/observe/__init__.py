"""What a run sees of a model's FP8 GEMMs: operands and their statistics."""
