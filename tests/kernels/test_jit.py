"""Interpretation of launches on a CPU: what it needs of Triton's interpreter, and what it leaves."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("triton")

from helpers.kernels.planted_tensors import planted, run

from fp8ref.kernels import norms


def test_threads_interpret_one_at_a_time():
    shape = (24, 64)  # 24 programs, each of which calls functions that call others
    launch = norms.statistics(shape, eps=1e-5)
    h, weight = planted(*shape, "bfloat16", seed=0), planted(1, shape[1], "bfloat16", seed=1)[0]
    outputs = [((shape[0],), "float32"), ((shape[0],), "int32")]

    def bits(_):
        return [x.tobytes() for x in run(launch, [h, weight], outputs)]

    expected = bits(0)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(bits, range(8))) == [expected] * 8
