"""Inputs that distinguish casts, scales and quantizers: chosen, random and special values, in every source dtype."""
