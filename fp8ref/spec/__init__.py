"""Choices as data, shared by the simulator and both backends; ``policy`` and ``recipe`` name
them.
"""
