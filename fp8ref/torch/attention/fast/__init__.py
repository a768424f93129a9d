"""Attention in fast arithmetic: scaled products in place of decoded operands."""
