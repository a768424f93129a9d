"""Options of ``parallelize`` that need no ranks."""

import dataclasses

import pytest
import torch

from fp8ref.torch.model.parallelism import Parallelism, Ranks


@pytest.mark.parametrize("key", ["amax_scope", "checkpointing", "compile", "fp8_from"])
def test_an_unknown_word_is_refused(key):
    with pytest.raises(ValueError, match=rf"{key} is one of .*; got 'nothing'"):
        Parallelism(**{key: "nothing"})


def test_gradients_are_summed_in_three_dtypes():  # P-25
    with pytest.raises(ValueError, match=r"reduce_dtype is one of .*; got torch.float16"):
        Parallelism(reduce_dtype=torch.float16)
    fp8 = Parallelism(reduce_dtype=torch.float8_e4m3fn)
    assert (fp8.reduces_fp8, fp8.sum_dtype) == (True, torch.float32)
    bf16 = dataclasses.replace(fp8, reduce_dtype=torch.bfloat16)
    assert (bf16.reduces_fp8, bf16.sum_dtype) == (False, torch.bfloat16)


def test_sequence_or_a_plan_cuts_linears():
    assert not Parallelism().cuts_linears
    assert Parallelism(sequence=True).cuts_linears
    assert Parallelism(tensor_plan={"up": "colwise"}).cuts_linears


def test_without_a_mesh_a_rank_is_alone():
    assert Ranks.of(None) == Ranks(None, None, None, None)
