"""Delayed scaling (spec H): its states, and notices of states that nothing updates."""

from fp8ref.torch.delayed.delayed import (
    DelayedState,
    RoleState,
    RoleStates,
    advance,
    calibrate,
    casts,
    forget,
    forget_unless,
    init,
    merge_,
    observe,
    states,
    update,
)

__all__ = [
    "DelayedState",
    "RoleState",
    "RoleStates",
    "advance",
    "calibrate",
    "casts",
    "forget",
    "forget_unless",
    "init",
    "merge_",
    "observe",
    "states",
    "update",
]
