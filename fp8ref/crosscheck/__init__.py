"""Do our backends agree with the specification? Hold both to the simulator, bit for bit where bits are defined (SEMANTICS B).

``one_device.crosscheck`` compares a config's real operands, GEMMs and losses; ``sharded_jax`` and ``sharded_torch`` do so on meshes. ``divergence``
finds where two trainings first differ; ``nonfinite.rerun`` finds where a step began to fail.
"""
