"""Chains of tensor-core steps, compiled by numba with LLVM's vectors."""
