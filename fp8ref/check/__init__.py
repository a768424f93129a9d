"""Holds the backends to the simulator: ``crosscheck`` compares a config's real operands, GEMMs and losses, bit for bit where bits are defined."""
