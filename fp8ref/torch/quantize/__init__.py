"""Amax, scale, codes and back; ``philox`` draws for stochastic rounding."""
