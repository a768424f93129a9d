"""Identify an optimizer: which layout of states it keeps, and in which order it computes AdamW.

subjects  somebody's optimizer as a function, and what is read of its state
forms     the orders of operations that AdamW is written in
identify  which layout and form explain every bit, or where the nearest departs
"""

from fp8ref.conformance.optimizer.identify import identify_optimizer as identify_optimizer
from fp8ref.conformance.optimizer.identify import require_optimizer as require_optimizer

__all__ = ["identify_optimizer", "require_optimizer"]
