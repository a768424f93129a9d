"""Identify a cast from its outputs: rounding, saturation, NaN codes, subnormals, double rounding."""
