"""What a GEMM does with scales, found by calls that show them alone."""
