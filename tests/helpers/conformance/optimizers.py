"""The simulator's AdamW as optimizers are asked: step(p, g, state, **numbers) -> (p, state)."""

from fp8ref.sim.states import states


def stepped(p, g, state, layout, **numbers):
    """A step in a layout, from a state or, where it is None, from the first one."""
    before = states.init(p.shape, layout) if state is None else state
    return states.step(p, g, before, states.AdamW(layout=layout, **numbers))
