import pytest

from fp8ref import study


@pytest.mark.parametrize("model", [None, lambda x: x, object()])
def test_another_kind_of_model_is_refused(model):
    with pytest.raises(
        ValueError, match=r"a study takes a torch\.nn\.Module or a flax\.nnx\.Module; got "
    ):
        study.framework(model)


def test_a_model_says_its_framework():
    nn = pytest.importorskip("torch.nn")
    assert study.framework(nn.Linear(2, 2)).__name__ == "fp8ref.study.torch_model"


def test_a_linen_module_is_no_model_of_nnx_also_in_a_bridge():
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")

    with pytest.raises(ValueError, match="Layers of linen are not seen"):
        study.framework(linen.Dense(2))
    bridged = nnx.bridge.ToNNX(linen.Dense(2), rngs=nnx.Rngs(0))
    with (
        pytest.raises(ValueError, match=r"a model without linears\. Layers of linen"),
        study.framework(bridged).record(bridged, rows=128, layers="*"),
    ):
        pass
