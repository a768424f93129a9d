"""Several trainings compared: sweeps of recipes and seeds, and ablations of operands."""
