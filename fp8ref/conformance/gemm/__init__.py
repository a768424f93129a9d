"""What arithmetic a scaled GEMM computes with, found from outside: by its outputs for chosen operands (SEMANTICS G-18)."""
