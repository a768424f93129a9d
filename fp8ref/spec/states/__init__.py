"""Optimizer states as data: ``layouts`` by name, and what one layout decides."""
