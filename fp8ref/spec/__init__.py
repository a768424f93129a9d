"""Choices as data, for the simulator and both backends; ``policy`` and ``recipe`` name them."""
