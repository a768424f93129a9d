"""Entries of the proof under a scan.

Proofs of steps are tested with the trainer, in ``test_step.py`` and ``test_mesh.py``.
"""

from fp8ref.train.jax import step_proof


def test_a_gemm_of_all_layers_is_listed_for_each():  # B-7
    of_all, own = {"gemm": "layers.*.up/output", "fmt": "e4m3fn"}, "lm_head/output"
    found = step_proof.by_layer([of_all, own], 2)
    assert found == [{"gemm": f"layers.{i}.up/output", "fmt": "e4m3fn"} for i in (0, 1)] + [own]
