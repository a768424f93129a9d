"""A linear for each group of rows, with a weight of its own (spec X)."""
