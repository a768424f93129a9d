"""Training over several devices against the simulator: a JAX mesh, PyTorch ranks, experts."""
