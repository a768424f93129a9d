"""A whole model: convert it and back, cut and shard it, report on it, switch its recipe."""
