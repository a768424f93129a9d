"""A backend that learns nothing, at once: for what is around a trainer."""

import json

import numpy as np

from fp8ref.spec.kernels import Kernels


class FakeTrainer:
    """Its loss falls by 1/8 a step from 5; its validation loss is the number of updates so far.

    on_step   step -> metrics, or what is raised there.
    """

    backend = "jax"
    device = "none: fake"
    kernels = {"none: fake": Kernels(False, "nothing is cast")}  # noqa: RUF012

    def __init__(self, config, on_step=None):
        self.decisions = config.decisions()
        self.recipe = config.numerics.recipe
        self.recipes: list[str] = []  # of each step
        self.batches: list[np.ndarray] = []
        self.validated: list[np.ndarray] = []
        self.on_step = on_step or {}
        self.count = 0

    def switch(self, recipe):
        self.recipe = recipe

    def step(self, tokens):
        found = self.on_step.get(self.count, {})
        if callable(found):
            found = found() or {}
        if isinstance(found, BaseException):
            raise found
        self.batches.append(tokens)
        self.recipes.append(self.recipe)
        self.count += 1
        return {"loss": 5.0 - 0.125 * (self.count - 1), "grad_norm": 1.0, **found}

    def measured_step(self, tokens):
        return (
            self.step(tokens),
            {"layer/output/input": {"amax": float(self.count), "sqnr": 30.0 - 2 * self.count}},
            {},
        )

    def evaluate(self, tokens):
        self.validated.append(tokens)
        return float(self.count)

    def peak_memory(self):
        return 3 << 29

    def weights(self):
        return {"sound": np.ones(2, np.float32), "broken": np.array([1, np.nan], np.float32)}

    def save(self, directory):
        if directory.parent.is_dir():  # made by the process that writes
            directory.mkdir()
            (directory / "count.json").write_text(json.dumps(self.count))
        return lambda: None

    def load(self, directory, step):
        self.count = json.loads((directory / "count.json").read_text())
        assert self.count == step
