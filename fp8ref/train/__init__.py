"""Train a Llama in FP8 with either backend: configuration, data, the training loop, checkpoints, logs and reports. No numerics of its own.

``config.load`` a TOML file, ``loop.train`` it with a backend, ``export.export`` its weights; ``report`` says afterwards how it went.
``tensors.read`` gives a run's tensors to a notebook. ``jax`` and ``torch`` hold the backends' models and steps.
"""

from fp8ref import extras

extras.require("train", "fp8ref.train", "pydantic", "tyro", "tomli_w", "rich")
