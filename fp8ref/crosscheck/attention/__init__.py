"""Attention of a training step against the simulator: codes, counts, states."""
