"""A user's Flax model in training: built, stepped, probed."""
