"""States that say which layout made them: through jit, optax's chains, flax and orbax (spec
O-17).
"""

import dataclasses
import re

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from fp8ref.jax.states import state as adamw_state
from fp8ref.jax.states import states
from fp8ref.spec.states import saved as layout_decisions
from fp8ref.spec.states.layouts import LAYOUTS, WITH_MASTERS

NAMED = LAYOUTS["sqrt_e4m3"]
CHANGED = dataclasses.replace(
    NAMED, m=dataclasses.replace(NAMED.m, scaling="divide"), bounded=False
)
"""The name, dtypes and shapes of NAMED; its codes are other moments."""

SAID = re.escape(
    "layout 'sqrt_e4m3' has m.scaling = 'multiply', saved 'divide'; bounded = True, saved "
    "False. States of another layout"
)


def params():
    return {"w": jnp.ones((2, 128)), "b": jnp.ones(3)}


def optimizer(layout):
    return optax.chain(optax.clip_by_global_norm(1.0), states.adamw(1e-3, layout=layout))


def update(layout, state):
    return optimizer(layout).update(params(), state, params())


def test_every_layout_fits_its_array():
    for layout in (LAYOUTS | WITH_MASTERS).values():
        found = np.asarray(adamw_state.decisions(layout))
        assert found.shape == (layout_decisions.BYTES,)
        assert found.tobytes().decode().rstrip() == layout_decisions.written(layout)


def test_a_changed_layout_of_the_same_name_is_refused():
    state = optimizer(CHANGED).init(params())
    for refused in (lambda: update("sqrt_e4m3", state), lambda: states.decode(state[1])):
        with pytest.raises(ValueError, match=SAID):
            refused()
    states.decode(state[1], dataclasses.replace(CHANGED, name="mine"))  # a name decides nothing


def test_under_jit_it_makes_every_weight_nan():
    """The program knows the text only when it runs; with its own state it has the bits of the eager
    one.
    """
    own, other = optimizer(NAMED).init(params()), optimizer(CHANGED).init(params())
    step = jax.jit(optimizer(NAMED).update)
    updates, after = step(params(), other, params())
    assert all(np.isnan(np.asarray(x)).all() for x in jax.tree.leaves(updates))
    assert np.asarray(after[1].decisions).tobytes() == layout_decisions.in_bytes(CHANGED)
    for found, wanted in zip(
        *map(jax.tree.leaves, (step(params(), own, params()), update(NAMED, own))), strict=True
    ):
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def by_orbax(state, like, folder):
    with ocp.StandardCheckpointer() as saver:
        saver.save(folder / "state", state)
        saver.wait_until_finished()
        return saver.restore(folder / "state", like)


def by_flax(state, like, folder):
    return flax.serialization.from_bytes(like, flax.serialization.to_bytes(state))


@pytest.mark.parametrize("through", [pytest.param(by_orbax, marks=pytest.mark.slow), by_flax])
def test_what_is_loaded_is_checked(through, tmp_path):
    """Nothing but the text differs: both libraries load it into a state of the other layout."""
    for made, refused in ((CHANGED, True), (NAMED, False)):
        state = update(made, optimizer(made).init(params()))[1]
        loaded = through(state, optimizer(NAMED).init(params()), tmp_path / str(refused))
        if refused:
            with pytest.raises(ValueError, match=SAID):
                update(NAMED, loaded)
        else:
            assert update(NAMED, loaded)[1][1].count == 2


def test_a_state_without_text_is_refused():
    state = states.adamw(1e-3).init(params())
    bad = np.zeros(layout_decisions.BYTES, np.uint8)
    for held, said in (
        (None, "got None"),
        (bad[:9], r"got \('uint8', \(9,\)\)"),
        (bad, "as text.* Use init"),
    ):
        with pytest.raises(ValueError, match=f"a state holds the decisions of its layout.*{said}"):
            states.adamw(1e-3).update(params(), state._replace(decisions=held), params())


def test_masters_are_read_under_their_own_layout():  # O-14
    changed = dataclasses.replace(
        WITH_MASTERS["msamp_o2"], master=WITH_MASTERS["sqrt_e4m3_f16"].master, bounded=True
    )
    state = states.adamw(1e-3, layout=changed).init(params())
    for read in (
        lambda: states.weights(state, "msamp_o2"),
        lambda: states.copies(state, "msamp_o2", "tensorwise"),
    ):
        with pytest.raises(
            ValueError, match=r"'msamp_o2' has master.amax = 'exact', saved 'predicted'; bounded"
        ):
            read()
