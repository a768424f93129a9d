from helpers.training import made_runs

from fp8ref.train.report import page


def test_runs_are_compared_with_the_first_in_bf16(tmp_path, small):
    fp8 = made_runs.make(tmp_path / "fp8", small, [5.0], recipe="tensorwise")
    bf16 = made_runs.make(tmp_path / "bf16", small, [5.0], seed=3)
    found = page.differences([fp8, bf16])
    assert (found.baseline, found.others) == (bf16, (fp8,))
    rows = {key: (mine, others) for key, mine, others in found.rows}
    assert rows == {
        "numerics.recipe": ("bf16", ("tensorwise",)),
        "run.seed": ("3", ("0",)),
        "data.seed": ("3", ("0",)),
    }


def test_a_key_that_one_run_lacks_is_a_dash(tmp_path, small):
    plain, other = (
        made_runs.make(tmp_path / name, config, [5.0])
        for name, config in (("a", small), ("b", small.replace(log={"wandb": "x"})))
    )
    assert page.differences([plain, other]).rows == (("log.wandb", "-", ("x",)),)
    assert page.differences([plain]).rows == ()


def test_all_keys_are_flat():
    assert page.flat({"a": {"b": 1, "c": ["x", None]}, "d": "é"}) == [
        ("a.b", "1"),
        ("a.c", '["x", null]'),
        ("d", "é"),
    ]
