"""Identify a quantizer: its granularity, scale policy, returned scales and rounding (S-16)."""
