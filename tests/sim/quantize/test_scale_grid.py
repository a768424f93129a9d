import numpy as np
import pytest

from fp8ref.sim.quantize import scale_grid, scaling
from fp8ref.spec.granularity import GRANULARITIES, lengths, scale_shape


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize(
    "shape", [(256, 256), (130, 256), (2, 128, 384), (5, 1, 128), (4096,)], ids=str
)
def test_the_grid_names_each_elements_scale(granularity, shape):  # S-6
    """Scales numbered from 0, spread by the grid and by ``scaling.spread``, meet the same
    elements.
    """
    blocks = lengths(granularity, len(shape), -1)
    g = scale_grid.grid_of(shape, blocks)
    numbered = np.arange(np.prod(g.scales), dtype=np.float32)
    by_spread = np.broadcast_to(
        scaling.spread(numbered.reshape(scale_shape(granularity, shape, -1)), shape, blocks), shape
    )
    columns = np.arange(g.columns) // g.width
    by_grid = numbered.reshape(g.scales)[g.group][:, columns]
    assert g.rows * g.columns == np.prod(shape)
    np.testing.assert_array_equal(by_grid.reshape(shape), by_spread)


def test_a_single_number_has_a_grid():
    assert scale_grid.grid_of((), ())[:2] == (1, 1)
