"""Attention as data: ``variants`` by name, and the decisions that a variant consists of."""
