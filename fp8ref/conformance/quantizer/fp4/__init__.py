"""Quantizers of 4-bit formats."""
