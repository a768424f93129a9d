"""Identify a quantizer: its granularity, axis, scale policy, outputs and cast, from its outputs (SEMANTICS S-16)."""
