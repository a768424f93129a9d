"""A linear for each group of rows (spec X), for experts of a model, and rows that move."""
