"""fp8ref's Triton kernels as operators of PyTorch, and whether they run on a device."""
