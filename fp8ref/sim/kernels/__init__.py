"""The simulator's functions again, compiled by numba for speed: equal to the plain ones bit for bit, which the tests hold them to.

A kernel is compiled at its first use, for its constants (a format's layout, a rounding) and cached on disk. Kernels take
contiguous arrays and check nothing: the functions that call them have.
"""
