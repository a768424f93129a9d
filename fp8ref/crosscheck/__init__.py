"""Do our backends agree with the specification? Compare both with the simulator (spec B).

Bits are compared where they are defined, and held to ``bounds`` where they are not.

- ``one_device.crosscheck``: a config's real operands, GEMMs, losses and gradients.
- ``sharded.jax_mesh``, ``sharded.torch_ranks``: the same on meshes of devices or ranks.
- ``divergence``: the first value in which two trainings differ.
- ``rerun``: the first non-finite value of a failed step.
"""
