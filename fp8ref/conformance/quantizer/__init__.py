"""Identify a quantizer from its outputs: granularity, scale policy, returned scales, rounding (SEMANTICS S-16)."""
