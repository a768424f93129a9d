"""What JAX's transformations may do with FP8: types of arrays, derivatives, eager calls."""
