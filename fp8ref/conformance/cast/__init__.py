"""Identify a cast: its rounding, saturation, NaN codes, subnormals and double rounding, from its outputs (SEMANTICS C-8)."""
