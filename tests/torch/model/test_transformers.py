"""A Hugging Face Llama is converted, trained, saved and loaded as any other model."""

import logging
import warnings

import pytest
import torch
import transformers

from fp8ref.torch import delayed
from fp8ref.torch.model import convert, parallel
from fp8ref.torch.model.convert import Linear

RECIPES = ("tensorwise", "rowwise", "delayed", "blockwise")
recipes = pytest.mark.parametrize("recipe", RECIPES)
# (are the embeddings tied, is lm_head in FP8)
heads = pytest.mark.parametrize(
    ("tied", "head"), [(False, False), (False, True), (True, False), (True, True)]
)
TOKENS = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small wait for a second thread longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def warned(caplog):
    """What transformers, whose logger does not propagate, has warned of in the test so far."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield lambda: [r.getMessage() for r in caplog.records if r.name.startswith("transformers.")]
    logger.removeHandler(caplog.handler)


def llama(recipe, *, tied=False):
    """hidden 64, or 128 for a recipe with blocks of 128."""
    hidden = 128 if recipe == "blockwise" else 64
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            num_hidden_layers=2,
            tie_word_embeddings=tied,
            max_position_embeddings=64,
            **sizes,
        )
    )


def train(model, steps, optimizer=None):
    """The losses of steps on one batch."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        delayed.update(model)
        losses.append(loss.item())
    return losses


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def converted_names(model):
    return {
        name
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and type(m) is not torch.nn.Linear
    }


def assert_loads_cleanly(path, weights, expected_logits):
    """from_pretrained reports no key and gives these weights and logits bit for bit."""
    loaded, report = transformers.LlamaForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values())
    found = dict(loaded.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert torch.equal(logits(loaded), expected_logits)


@pytest.mark.grid(2)
@recipes
@heads
#
def test_a_llama_trains_and_its_weights_load_into_an_unconverted_one(
    recipe, tied, head, tmp_path, warned
):
    model = llama(recipe, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    assert convert.convert(model, recipe, filter_fqns=() if head else ("lm_head",)) is model
    fp8 = converted_names(model)
    assert ("lm_head" in fp8) == head
    assert "model.layers.1.mlp.down_proj" in fp8
    losses = train(model, 20, optimizer)
    assert losses[-1] < 0.7 * losses[0]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied

    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    of_fp8 = logits(model)
    model.save_pretrained(tmp_path / "during", state_dict=convert.weights(model))
    assert convert.deconvert(model) is model
    assert not converted_names(model)
    assert not torch.equal(logits(model), of_fp8)
    model.save_pretrained(tmp_path / "after")
    for name in ("during", "after"):
        assert_loads_cleanly(tmp_path / name, weights, logits(model))
    assert not warned()


def test_states_saved_with_the_weights_are_what_from_pretrained_warns_of(tmp_path, warned):
    """Why ``weights`` and ``deconvert`` are there: nothing fails, but every state is reported."""
    model = convert.convert(llama("delayed"), "delayed", filter_fqns=["lm_head"])
    train(model, 1)
    model.save_pretrained(tmp_path)
    _, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert any("UNEXPECTED" in message for message in warned())
    assert (
        set(report["unexpected_keys"]) == model.state_dict().keys() - convert.weights(model).keys()
    )
    assert not report["missing_keys"]
    assert len(report["unexpected_keys"]) == 3 * 3 * sum(
        isinstance(m, Linear) for m in model.modules()
    )


@recipes
def test_a_tied_head_in_fp8_and_the_embedding_add_up_in_one_gradient(recipe):
    tied, untied = llama(recipe, tied=True), llama(recipe)
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        convert.convert(model, recipe, fp8_fqns=["lm_head"])(
            input_ids=TOKENS, labels=TOKENS
        ).loss.backward()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    head, table = untied.lm_head.weight.grad, untied.model.embed_tokens.weight.grad
    assert head.any()
    assert table.any()
    assert torch.equal(tied.model.embed_tokens.weight.grad, head + table)


@pytest.mark.grid(3)
@recipes
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_bit(recipe, reentrant):  # H-4
    def run(checkpointed):
        model = llama(recipe)
        if checkpointed:
            with warnings.catch_warnings():
                # transformers 5.23 prefers another name, which 5.0 does not have
                warnings.simplefilter("ignore", FutureWarning)
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        convert.convert(model, recipe, filter_fqns=["lm_head"])
        losses = train(model, 2)
        return losses, model.state_dict()

    (losses, plain), (losses_again, checkpointed) = run(False), run(True)
    assert losses == losses_again
    assert all(torch.equal(checkpointed[key], value) for key, value in plain.items())


@pytest.mark.parametrize("how", ["selective", "full"])
def test_blocks_are_checkpointed_by_parallelize(how):  # T-8
    """Without a cache, which transformers keeps in training too, and to which a second forward pass
    would append.
    """
    plain, checkpointed = llama("delayed"), llama("delayed")
    with pytest.raises(
        ValueError, match=r"got config\.use_cache = True\. Set it to False for training"
    ):
        parallel.parallelize(
            checkpointed,
            "delayed",
            blocks=checkpointed.model.layers,
            parallelism=parallel.Parallelism(checkpointing=how),
        )
    checkpointed.config.use_cache = False
    parallel.parallelize(
        checkpointed,
        "delayed",
        blocks=checkpointed.model.layers,
        parallelism=parallel.Parallelism(checkpointing=how),
    )
    convert.convert(plain, "delayed")
    assert train(checkpointed, 2) == train(plain, 2)
    found = checkpointed.state_dict()
    assert all(torch.equal(found[key], value) for key, value in plain.state_dict().items())
