"""Around a backend: configuration, data, the training loop, its records and pictures. No numerics of its own.

``config.load`` a TOML file, ``loop.train`` it with a backend, ``export.export`` its weights; ``plan`` says beforehand what that would take, and
``report`` afterwards how it went. ``tensors.read`` gives a run's tensors to a notebook.
"""
