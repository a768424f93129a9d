"""A user's PyTorch model in training: built, stepped, probed."""
