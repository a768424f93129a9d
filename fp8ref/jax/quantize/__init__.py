"""Amax, scale, codes and back; ``division`` rounds once on GPUs too; ``philox`` draws."""
