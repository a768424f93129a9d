"""Compiled twins of the simulator's definitions, by numba: equal bit for bit, as tests check.

A kernel is compiled at its first use, for its constants (a format's layout, a rounding), and cached
on disk. Kernels take contiguous arrays and check nothing: their callers have checked.
"""
