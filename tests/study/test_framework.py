import pytest

from fp8ref.study import framework


@pytest.mark.parametrize("model", [None, lambda x: x, object()])
def test_another_kind_of_model_is_refused(model):
    with pytest.raises(ValueError, match=r"a study takes a torch\.nn\.Module or a flax\.nnx\.Module; got "):
        framework.of(model)


def test_a_model_says_its_framework():
    nn = pytest.importorskip("torch.nn")
    assert framework.of(nn.Linear(2, 2)).__name__ == "fp8ref.study.torch_model"
