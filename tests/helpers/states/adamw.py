"""The optimizer of spec T in float64, from known gradients: what both backends' steps are held
to.
"""

import numpy as np
import pytest

from fp8ref.spec import llama

OPTIMIZER = {
    "learning_rate": 0.01,
    "min_learning_rate": 0.002,
    "warmup_steps": 2,
    "max_norm": 0.7,
    "weight_decay": 0.5,
    "eps": 1e-3,
}
STEPS = 6


def slopes(config) -> dict[str, np.ndarray]:
    """float32 by parameter: the gradient of the loss sum(p * slope), at every step."""
    rng = np.random.default_rng(5)
    return {
        name: rng.standard_normal(shape).astype(np.float32) / 50
        for name, shape in llama.parameter_shapes(config.model).items()
    }


def check(trainer_class, config, slope: dict[str, np.ndarray]) -> None:
    """Six steps of a trainer whose loss was replaced by sum(p * slope): warm-up, cosine, clipping,
    decay on matrices alone.
    """
    start = llama.initial_weights(config.model, seed=0)
    trainer = trainer_class(config.replace(optimizer=OPTIMIZER, run={"steps": STEPS}), start)
    expected = {name: value.astype(np.float64) for name, value in start.items()}
    m, v = ({name: np.zeros(value.shape) for name, value in start.items()} for _ in range(2))
    norm = np.sqrt(sum((c.astype(np.float64) ** 2).sum() for c in slope.values()))
    assert norm > 0.7  # clipping acts
    for step in range(STEPS):
        assert trainer.step(np.zeros((1, 2), np.int32))["grad_norm"] == pytest.approx(
            norm, rel=1e-5
        )
        lr = (
            0.01 * (step + 1) / 2
            if step < 2
            else 0.002 + 0.008 * (1 + np.cos(np.pi * (step - 2) / 4)) / 2
        )
        for name, p in expected.items():
            g = slope[name] * min(1, 0.7 / norm)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g**2
            update = (
                m[name]
                / (1 - 0.9 ** (step + 1))
                / (np.sqrt(v[name] / (1 - 0.95 ** (step + 1))) + 1e-3)
            )
            expected[name] = p - lr * (update + (0.5 * p if p.ndim == 2 else 0))
    for name, value in trainer.weights().items():
        # float32 against float64, six steps of about ten roundings each of values up to 1: 60 *
        # 2^-24
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=4e-6, err_msg=name)
