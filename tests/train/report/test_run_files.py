import json

import pytest
from helpers.training import made_runs

from fp8ref.shared.errors import ConfigError
from fp8ref.train.report import run_files

OPERAND = "model.layers.0.mlp.up_proj/output/input"


@pytest.fixture
def run(tmp_path, small):
    return made_runs.make(tmp_path / "run", small, [5.0, 4.0, 3.0], recipe="tensorwise").path


def line(**values) -> str:
    return json.dumps({"step": 3, "loss": 2.0} | values) + "\n"


def measured(step=0, **measures) -> str:
    return json.dumps({"step": step, "statistics": {OPERAND: {"amax": 2.0} | measures}}) + "\n"


def test_what_a_run_writes_is_taken_as_it_is(run):
    assert run_files.manifest(run) == json.loads((run / "manifest.json").read_text())
    assert run_files.metrics(run) == [
        json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert run_files.statistics(run) == []
    (run / "statistics.jsonl").write_text(
        measured(sqnr=None) + measured(9, non_finite=3, amax=None)
    )
    assert [found["step"] for found in run_files.statistics(run)] == [0, 9]


@pytest.mark.parametrize(
    ("rest", "count"),
    [('{"step": 3, "lo', 3), (line().rstrip(), 3), (line(), 4), (line() + "{", 4)],
)
def test_a_torn_last_line_is_left_out(run, rest, count):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(rest)
    assert len(run_files.metrics(run)) == count


@pytest.mark.parametrize("read", [run_files.metrics, run_files.statistics])
@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "3", "null", pytest.param("[" * 100_000, id="deep")]
)
def test_a_line_that_is_no_object_is_named(run, read, content):
    (run / f"{read.__name__}.jsonl").write_text(content + "\n")
    with pytest.raises(
        ConfigError,
        match=rf"{read.__name__}\.jsonl, line 1, is not a JSON object\. Repair it, or leave "
        r".*/run out\.",
    ):
        read(run)


@pytest.mark.grid(5)
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (line(loss=None), "has loss = null: it should be a valid number"),
        (line(loss="abc"), 'has loss = "abc": it should be a valid number'),
        (line(loss=True), "has loss = true: it should be a valid number"),
        (line(loss=float("nan")), "has loss = NaN: it should be a finite number"),
        (line(loss=1e300), r"has loss = 1e\+300: it should be less than"),
        (line(loss=10**400), "has loss = "),
        (line(step="x"), 'has step = "x": it should be a valid integer'),
        (line(step=1.5), r"has step = 1\.5: it should be a valid integer"),
        (line(step=-1), "has step = -1: it should be greater than or equal to 0"),
        (line(step=2**70), "has step = "),
        (line(step=2), "has step 2 after step 2; each step occurs once, in order"),
        (line(step=0), "has step 0 after step 2"),
        (line(tokens_per_second="fast"), 'has tokens_per_second = "fast"'),
        (line(grad_norm=[1]), r"has grad_norm = \[1\]"),
        (line(val_loss={}), "has val_loss = {}"),
        ('{"step": 3}\n', "has no loss"),
        ('{"loss": 3}\n', "has no step"),
    ],
)
def test_a_line_of_metrics_that_is_damaged_is_named(run, content, problem):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(content)
    with pytest.raises(
        ConfigError, match=rf"metrics\.jsonl, line 4, {problem}.*\. Repair it, or leave"
    ):
        run_files.metrics(run)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (
            measured(5, amax="oops"),
            rf'has statistics\.{OPERAND}\.amax = "oops": it should be a valid number',
        ),
        (measured(5, amax=-1.0), "amax = -1.0: it should be greater"),
        (measured(5, amax=1e39), r"amax = 1e\+39: it should be less"),
        (measured(5, sqnr=[]), r"sqnr = \[\]"),
        (measured(5, non_finite=None), "non_finite = null"),
        (measured(0), "has step 0 after step 0"),
        ('{"step": 5}\n', "has no statistics"),
        ('{"statistics": {}}\n', "has no step"),
        ('{"step": 5, "statistics": []}\n', r"has statistics = \[\]: it should be"),
        (
            '{"step": 5, "statistics": {}, "states": {"": {"count": 0}}}\n',
            "has states..count = 0: it should be greater",
        ),
        (
            json.dumps({"step": 5, "statistics": {OPERAND: 3}}) + "\n",
            "up_proj/output/input = 3: it should be",
        ),
        (
            '{"step": 5, "statistics": {"x": {}}}\n',
            r"has statistics\.x: an operand is <layer>/ and one of output/input, output/weight",
        ),
        (
            '{"step": 5, "statistics": {"a/output/grad_output": {}}}\n',
            r"has statistics\.a/output/grad_output: an operand",
        ),
    ],
)
def test_a_line_of_statistics_that_is_damaged_is_named(run, content, problem):
    (run / "statistics.jsonl").write_text(measured() + content)
    with pytest.raises(
        ConfigError, match=rf"statistics\.jsonl, line 2, .*{problem}.*\. Repair it, or leave"
    ):
        run_files.statistics(run)


def changed(run, path, value):
    """The manifest with one value put at a dotted path, or taken away."""
    manifest = json.loads((run / "manifest.json").read_text())
    *parents, last = path.split(".")
    at = manifest
    for key in parents:
        at = at[int(key) if key.isdecimal() else key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    (run / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.grid(5)
@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("config.data.seed", None, r"has no config\.data\.seed"),
        ("linears", None, "has no linears"),
        ("config", [], r"has config = \[\]: it should be"),
        ("config.model", 3, r"has config\.model = 3"),
        ("config.run", "x", r'has config\.run = "x"'),
        ("config.run.seed", "0", r'has config\.run\.seed = "0": it should be a valid integer'),
        ("config.data.batch_size", 0, r"has config\.data\.batch_size = 0: it should be greater"),
        ("config.statistics.every", "often", r"has config\.statistics\.every"),
        ("data", ["text"], r'has data = \["text"\]'),
        ("status", 3, "has status = 3: it should be a valid string"),
        ("error", 3, "has error = 3"),
        ("versions", [], r"has versions = \[\]"),
        ("linears", "garbage", 'has linears = "garbage": it should be a valid array'),
        ("linears", ["up_proj"], r'has linears\.0 = "up_proj"'),
        ("linears.1.shape", 3, r"has linears\.1\.shape = 3"),
        ("linears.0.fp8", "yes", r"has linears\.0\.fp8"),
        ("proof", {"gemms": []}, r"has no proof\.read_from"),
    ],
)
def test_a_manifest_that_is_damaged_is_named(run, path, value, problem):
    changed(run, path, value)
    with pytest.raises(
        ConfigError,
        match=rf"manifest\.json {problem}.*\. .*/run is not an intact run\. Leave it out\.",
    ):
        run_files.manifest(run)


@pytest.mark.parametrize("content", ["", "[]", '{"fp8ref": "0", "sta'])
def test_a_manifest_that_is_none_is_refused(run, content):
    (run / "manifest.json").write_text(content)
    with pytest.raises(
        ConfigError, match=r"manifest\.json (cannot be read|is not a manifest of fp8ref)"
    ):
        run_files.manifest(run)


def test_no_directory_and_no_run_are_refused(run, tmp_path):
    for path in (tmp_path / "absent", run / "metrics.jsonl"):
        with pytest.raises(ConfigError, match="is not a directory"):
            run_files.manifest(path)
    with pytest.raises(ConfigError, match="not an intact run"):
        run_files.manifest(tmp_path)


def test_half_a_surrogate_pair_is_text(run):
    """As in the path of a text whose name is no UTF-8."""
    changed(run, "config.data.source", "caf\udce9")
    assert run_files.manifest(run)["config"]["data"]["source"] == "caf\udce9"
