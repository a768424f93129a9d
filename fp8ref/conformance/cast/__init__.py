"""Identify a cast: its rounding, overflow, NaN codes, subnormals and double rounding (C-8)."""
