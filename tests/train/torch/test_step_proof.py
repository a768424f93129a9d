from helpers.processes.ranks import run

from fp8ref.train.data import loader
from fp8ref.train.torch.trainer import Trainer


def proved(config, tokens):
    """A rank's proof, and its losses of one batch, again and again."""
    trainer = Trainer(config)
    proof = trainer.prove(tokens)
    return (
        proof["missing"],
        sorted(gemm["gemm"] for gemm in proof["gemms"] if gemm["fp8"]),
        [trainer.step(tokens)["loss"] for _ in range(3)],
    )


def test_ranks_that_share_linears_prove_every_gemm(small):  # B-8, P-14
    config = small.replace(
        numerics={"recipe": "delayed"},
        model={"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2},
    )
    found = run(
        2,
        proved,
        config.replace(parallel={"tensor": 2, "sequence": True}),
        loader.open_batches(config).step(0),
    )
    assert found[0] == found[1]
    missing, gemms, losses = found[0]
    assert missing == []
    assert len(set(gemms)) == len(gemms) == 3 * sum(d.fp8 for d in config.decisions())
    assert losses[-1] < losses[0]
