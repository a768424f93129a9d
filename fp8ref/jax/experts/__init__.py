"""A linear for each group of rows (spec X), and rows that move between devices."""
