"""Claims about FP8 training: how a verdict is reached, what is kept, and what the page shows."""

import dataclasses
import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fp8ref import cli
from fp8ref.findings import (
    CLAIMS,
    Claim,
    Sample,
    Trial,
    casts,
    measure,
    measuring,
    picture,
    proxies,
    recorded,
    registry,
    sums,
    training,
)
from fp8ref.findings.claim import FEWEST, interval, replaced
from fp8ref.selection.rules import Rule
from fp8ref.shared.errors import ConfigError, NonFiniteError, StoppedError
from fp8ref.train import loop

DOCS = Path(__file__).parents[1] / "docs"
CLAIM = CLAIMS["promotion"]


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.2, 2.0, "reproduced"),
        (1.05, 2.0, "cannot tell"),
        (0.5, 1.05, "not reproduced"),
        (-3.0, 0.5, "not reproduced"),
        (-1.0, 3.0, "cannot tell"),
    ],
)
def test_a_verdict_is_of_the_whole_interval(low, high, verdict):
    claim = dataclasses.replace(CLAIM, above=1.0, margin=0.1)
    assert claim.verdict(low, high) == verdict


def test_an_interval_is_students():
    # t of 3 degrees of freedom at 95 % is 3.1824, and the standard error sqrt(5 / 3) / 2
    mean, low, high = interval([1.0, 2.0, 3.0, 4.0])
    assert mean == 2.5
    assert high - mean == pytest.approx(3.1824 * (5 / 3) ** 0.5 / 2, rel=1e-4)
    assert mean - low == pytest.approx(high - mean)


def test_a_pilots_spread_says_how_many_seeds():
    """Mean 3, spread 1, threshold 2: t(n - 1) / sqrt(n) is below 1 from n = 7 on (2.447 / 2.646)."""
    claim = dataclasses.replace(CLAIM, above=1.5, margin=0.5, most=9)
    assert claim.seeds_needed([2.0, 3.0, 4.0]) == claim.seeds([2.0, 3.0, 4.0]) == 7
    assert dataclasses.replace(claim, most=6).seeds([2.0, 3.0, 4.0]) == 6
    assert claim.seeds([2.99, 3.0, 3.01]) == FEWEST
    assert claim.seeds_needed([1.0, 2.0, 3.0]) is None
    assert claim.seeds([1.0, 2.0, 3.0]) == 9


@pytest.fixture
def counted(monkeypatch):
    """A measure of ``promotion`` that keeps the seeds of its trials; the figure is 10, and a tenth
    of the seed's last digit.
    """

    def promotion(trial):
        if trial.seed == promotion.stops:
            raise KeyboardInterrupt
        promotion.seen.append(trial.seed)
        return Sample(10 + trial.seed % 10 / 10, {"a": [1.0] * 8})

    promotion.seen, promotion.stops = [], None
    monkeypatch.setattr(measuring, "measure_of", lambda claim: promotion)
    return promotion


def test_a_stopped_measurement_goes_on(tmp_path, counted):
    counted.stops = 2
    with pytest.raises(KeyboardInterrupt):
        measuring.measure(CLAIM, tmp_path)
    assert counted.seen == [1000, 1001, 1002, 0, 1]
    counted.stops = None
    notes = []
    finding = measuring.measure(CLAIM, tmp_path, notes.append)
    assert counted.seen == [1000, 1001, 1002, 0, 1, 2, 3, 4]
    assert len(notes) == 8
    assert [sample.figure for sample in finding.samples] == [10, 10.1, 10.2, 10.3, 10.4]
    assert [sample.figure for sample in finding.pilot] == [10, 10.1, 10.2]
    assert finding.verdict == "reproduced"
    back = measuring.from_dict(CLAIM, json.loads(json.dumps(finding.to_dict())))
    assert dataclasses.replace(back, seconds=finding.seconds) == finding


def test_trials_of_other_code_do_not_count(tmp_path, counted, monkeypatch):
    """Nor do they go: they are kept apart."""
    measuring.measure(CLAIM, tmp_path)
    monkeypatch.setattr(measuring, "_code", lambda claim, function: "another")
    measuring.measure(CLAIM, tmp_path)
    assert len(counted.seen) == 16
    assert len(list(tmp_path.glob("*/promotion.json"))) == 2


def test_code_is_all_that_may_change_a_figure():
    def function(trial):
        return Sample(1.0)

    package = measuring._code(CLAIM, None)
    assert package == measuring._code(CLAIMS["mx_clipping"], None)
    assert package != measuring._code(CLAIM, function)
    arms = CLAIMS["equal_time"]
    for fields in ({"arms": dict(list(arms.arms.items())[:2])}, {"x": [1]}):
        assert measuring._code(dataclasses.replace(arms, **fields), None) != package


def test_a_damaged_file_is_an_error(tmp_path, counted):
    measuring.measure(CLAIM, tmp_path)
    (path,) = tmp_path.glob("*/promotion.json")
    whole = path.read_bytes()
    for text in (
        b'{"trials": []}',
        b"[]",
        b'{"trials": {"0": {"figure": 1}}}',
        whole[:90],
        b"\xff",
    ):
        path.write_bytes(text)
        with pytest.raises(ConfigError, match=r"promotion.json holds .* Delete it"):
            measuring.measure(CLAIM, tmp_path)
    path.write_bytes(whole)
    assert measuring.measure(CLAIM, tmp_path).verdict == "reproduced"
    assert len(counted.seen) == 8


@pytest.mark.parametrize("kind", [KeyboardInterrupt, StoppedError])
def test_a_run_that_is_stopped_says_what_goes_on(tmp_path, monkeypatch, kind):
    """Not --resume, which the command that trains has and this one has not."""

    def train(config, backend, out):
        raise kind("interrupted after 4 steps, which are saved; --resume continues.")

    monkeypatch.setattr(loop, "train", train)
    trial = Trial(seed=0, folder=tmp_path)
    with pytest.raises(kind, match=r"^stopped; .* are kept, and the same command goes on\.$"):
        training.loss(trial, training.tiny(trial, "bf16"))
    assert not list(tmp_path.iterdir())


def test_damaged_losses_are_an_error(tmp_path):
    trial = Trial(seed=0, folder=tmp_path)
    config = training.tiny(trial, "bf16")
    path = tmp_path / "losses" / f"{training._name(config)}.json"
    path.parent.mkdir()
    for text in ("[2.5, 2.", "{}"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"{path.name} holds .* it is damaged.* Delete it"):
            training.loss(trial, config)


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (Sample(math.nan), r"the figure of promotion is finite; seed 1000: nan"),
        (Sample(1.0, {"a": [1.0] * 3}), r"each line of promotion has a number for every x, 8; got"),
        (1.5, r"promotion is measured as Sample\(figure, lines\), .*; got 1.5. Return one."),
        (None, r"promotion is measured as Sample\(figure, lines\), .*; got None"),
        (Sample(None), r"of a number and a dict; got Sample\(figure=None"),
        (Sample(1.0, [1.0] * 8), r"of a number and a dict; got Sample\(figure=1.0, lines=\["),
    ],
)
def test_a_sample_that_cannot_be_judged_or_drawn_is_refused(tmp_path, sample, text):
    with pytest.raises(ValueError, match=text):
        measuring.measure(CLAIM, tmp_path, function=lambda trial: sample)
    assert not list(tmp_path.glob("*/*.json"))


OWN = Claim(
    name="own", claim="a", source="b", figure="c", method="d", limits="e", topic="f", x=[1, 2]
)


def test_a_claim_of_ones_own_is_measured_by_its_function(tmp_path):
    """NumPy's numbers are numbers, and a folder is a path or its name."""

    def own(trial):
        return Sample(np.float32(trial.seed % 5), {"a": np.array([1, 2], np.float32)})

    finding = measure(OWN, str(tmp_path), function=own)
    assert [sample.figure for sample in finding.pilot] == [0, 1, 2]
    assert measure(OWN, tmp_path, function=own) == finding, "and read again"
    with pytest.raises(ValueError, match=r"needs the function .* got none for own. Pass function="):
        measure(OWN, tmp_path)
    with pytest.raises(ConfigError, match=r"a def of a file or of a notebook; got <function"):
        measure(OWN, tmp_path, function=eval("lambda trial: 1"))
    with pytest.raises(ValueError, match=r"name is an identifier, .* got '../own'"):
        dataclasses.replace(OWN, name="../own")


@pytest.mark.parametrize(
    ("pilot", "count", "text"),
    [
        ([2.99, 3.0, 3.01], 5, "4 seeds decide; 5, the least, were measured."),
        ([2.0, 3.0, 4.0], 7, "7 seeds decide; 7 were measured."),
        ([1.5, 3.0, 4.5], 9, "12 seeds decide; 9, the most that the page allows, were measured."),
    ],
)
def test_the_text_says_why_so_many_seeds(pilot, count, text):
    claim = dataclasses.replace(CLAIM, above=2.0, margin=0.0, most=9)
    samples = [Sample(3.0)] * count
    finding = measuring.Finding(
        claim=claim, pilot=[*map(Sample, pilot)], samples=samples, seconds=1.0, about={}
    )
    assert finding.power() == f"By the spread of 3 pilot seeds, {text}"


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "a" / "b.json"
    with replaced(path) as part:
        part.write_text("1")
        assert not path.exists()
    assert path.read_text() == "1"
    with pytest.raises(FileNotFoundError), replaced(path):
        (path.parent / "missing").read_text()
    assert path.read_text() == "1"


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_says_what_it_measures_and_what_not(name):
    claim = CLAIMS[name]
    assert registry.measure_of(claim).__name__ == ("loss_of_arms" if claim.arms else name)
    for text in (claim.claim, claim.source, claim.figure, claim.method, claim.limits, claim.topic):
        assert text.strip()
    for quote in (*claim.quotes.values(), *claim.answers.values()):
        quote.format(mean=1, low=1, high=1, seeds=1)


@pytest.mark.parametrize("name", CLAIMS)
def test_what_was_recorded_is_of_this_claim(name):
    finding = recorded()[name]
    claim = finding.claim
    figures = [sample.figure for sample in finding.samples]
    assert len(figures) == claim.seeds([sample.figure for sample in finding.pilot])
    kept = json.loads(measuring.RECORDED.read_text())[name]
    assert (kept["mean"], kept["low"], kept["high"]) == pytest.approx(interval(figures))
    assert kept["verdict"] == claim.verdict(kept["low"], kept["high"])
    assert {"machine", "python", "fp8ref"} < finding.about.keys()
    assert claim.form.format(finding.interval[0]) in finding.quote()
    for sample in (*finding.pilot, *finding.samples):
        assert {len(line) for line in sample.lines.values()} == {len(claim.places)}
    assert finding.seconds < 1800
    assert (DOCS / "findings" / f"{name}.png").stat().st_size > 2_000


def test_all_take_at_most_ninety_minutes_on_two_cores():
    assert sum(finding.seconds for finding in recorded().values()) / 2 < 5400


def test_the_page_is_the_one_that_was_recorded():
    path = DOCS / "scripts" / "findings.py"
    spec = importlib.util.spec_from_file_location("findings_page", path)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    assert (DOCS / "findings.md").read_text() == page.page(recorded())


@pytest.mark.parametrize(
    "name", [n for n in CLAIMS if any(hasattr(module, n) for module in (casts, sums))]
)
def test_a_figure_is_measured_again(name, tmp_path):
    """The simulator's bits are the same everywhere.

    NumPy's float64 sums differ in order: 2^-30 of a figure is far above that.
    """
    figure = registry.measure_of(CLAIMS[name])(Trial(seed=0, folder=tmp_path)).figure
    assert figure == pytest.approx(recorded()[name].samples[0].figure, rel=2**-30, abs=2**-30)


def test_a_finding_is_drawn_with_and_without_names():
    for name in ("promotion", "four_over_six"):
        left, right = picture.draw(recorded()[name]).axes
        assert left.get_legend() is not None
        assert recorded()[name].verdict in right.get_title()


def test_a_run_is_trained_once_and_one_that_diverged_knows_nothing(tmp_path, monkeypatch):
    trial, runs = Trial(seed=0, folder=tmp_path), []

    def train(config, backend, out):
        runs.append(config.numerics.recipe)
        (out / "x").parent.mkdir()
        raise NonFiniteError("loss nan")

    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(
        training.runs, "read", lambda out: type("Run", (), {"diverged": True, "losses": {0: 1.0}})
    )
    for _ in range(2):
        assert training.loss(trial, training.tiny(trial, "rowwise")) == math.log(256)
    assert runs == ["rowwise"]


def test_a_cast_of_gradients_is_changed_only_where_it_differs(tmp_path):
    trial = Trial(seed=0, folder=tmp_path)
    for recipe, own in (("tensorwise", "e5m2"), ("rowwise", "e4m3fn"), ("mxfp8", "e4m3fn")):
        for fmt in ("e4m3fn", "e5m2"):
            config = training.gradients_in(trial, recipe, fmt)
            assert (config.numerics.rules is None) == (fmt == own)
            casts = next(d for d in config.decisions() if d.fp8).recipe.operand_casts
            assert {c.cast.fmt.name for c in casts if c.role == "grad_output"} == {fmt}


def test_the_command_lists_measures_and_refuses(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["finding"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in CLAIMS)
    assert cli.main(["finding", "mx_clipping", "--json", "one.json"]) == 0
    out = capsys.readouterr().out
    assert "verdict   reproduced" in out
    assert "recorded  " in out
    kept = json.loads((tmp_path / "one.json").read_text())
    assert kept["samples"][0]["figure"] == recorded()["mx_clipping"].samples[0].figure
    assert (tmp_path / "findings" / "mx_clipping.png").exists()
    for words, text in (
        (["mx_cliping"], "a claim; got 'mx_cliping'. Did you mean 'mx_clipping'"),
        (["zzz"], "a claim; got 'zzz'. `fp8ref finding` lists them."),
        (["--jobs", "0"], "--jobs is at least 1; got 0"),
        (["mx_clipping", "--out", "one.json/sub"], "--out names a directory, there or to be made"),
        (["mx_clipping", "--jobs", "0"], "--jobs is at least 1; got 0"),
        (["mx_clipping", "--out", "one.json"], "--out names a directory"),
    ):
        assert cli.main(["finding", *words]) == 2
        assert text in capsys.readouterr().err


ARMS = [claim for claim in CLAIMS.values() if claim.arms]


@pytest.mark.parametrize("claim", ARMS, ids=lambda claim: claim.name)
def test_arms_are_runs_that_differ(claim, tmp_path):
    """In what they say: each from the others, and by its rules from its recipe."""
    trial = Trial(seed=3, folder=tmp_path, arms=claim.arms)
    runs = {name: training.run_of(trial, arm) for name, arm in claim.arms.items()}
    assert len({str(config) for config in runs.values()}) == len(runs)
    for name, config in runs.items():
        assert (config.run.seed, config.data.seed) == (3, 3)
        rules = claim.arms[name].get("rules", ())
        assert len(config.numerics.rules or ()) == len(rules)
        plain = config.replace(numerics={"rules": None})
        assert (config.decisions() != plain.decisions()) == bool(rules)


def test_the_figure_of_arms_is_the_last_less_the_one_before(tmp_path, monkeypatch):
    arms = CLAIMS["equal_time"].arms
    losses = iter([3.0, 3.25, 3.0625, 3.5])  # bf16, and the arms
    monkeypatch.setattr(training, "loss", lambda trial, config: next(losses))
    sample = training.loss_of_arms(Trial(seed=0, folder=tmp_path, arms=arms))
    assert sample == Sample(0.4375, {"gap to bf16": [0.25, 0.0625, 0.5]})


def test_products_of_unit_scaled_layers_have_unit_variance():
    """A sum of 64 products of standard normal numbers, divided by 8: 1, and over 4,096 rows and 64
    columns within a few sqrt(2 / 64 / 64) = 2 %.
    """
    torch.manual_seed(0)
    layer = proxies.UnitScaled(64, 64)
    assert float(layer(torch.randn(4096, 64)).detach().std()) == pytest.approx(1, abs=0.06)


def test_small_models_are_watched_and_cast(tmp_path, monkeypatch):
    """q, k and v go into attention, one tensor into a down projection; casts change a loss, and a
    scale of 1 is another cast than a current scale.
    """
    monkeypatch.setattr(training, "STEPS", 3)
    trial = Trial(seed=0, folder=tmp_path)
    for place, count in (("attention", 3), ("down", 1)):
        for post in (False, True):
            measured = proxies._watched(trial, place, lambda *x: len(x) * x[0].ndim, post=post)
            assert measured == [count * (4 if place == "attention" else 3)]
    losses = [
        proxies._last_loss(trial, proxies.UnitScaled, rules)
        for rules in (None, (), (Rule(layers=("0", "1"), policy="unscaled"),))
    ]
    assert len(set(losses)) == 3
    # three steps of a loss near log(256) = 5.5, which casts do not change by a hundredth
    assert max(losses) - min(losses) < 0.05


def test_small_models_are_compared_as_the_claims_say(tmp_path, monkeypatch):
    trial = Trial(seed=0, folder=tmp_path)
    losses = iter([2.0, 2.5, 2.25, 3.0, 3.5, 3.125])  # plain, current scales, none: of each model
    monkeypatch.setattr(proxies, "_last_loss", lambda *arguments: next(losses))
    lines = {"current scales": [0.5, 0.5], "no scales": [0.25, 0.125]}
    assert proxies.unit_scaling(trial) == Sample(0.25, lines)

    def watched(trial, place, measure, *, post):
        return [1.0, 4.0] if post else [2.0, 9.0]

    monkeypatch.setattr(proxies, "_watched", watched)
    lines = {"norms before, SwiGLU": [2.0, 9.0], "after, GELU": [1.0, 4.0]}
    assert proxies.post_norm_attention(trial) == Sample(5.0, lines)
    assert proxies.post_norm_kurtosis(trial) == Sample(4.0, lines)


@pytest.mark.parametrize("last", [math.nan, math.inf])
def test_a_small_model_that_diverged_knows_nothing(tmp_path, monkeypatch, last):
    monkeypatch.setattr(proxies, "_steps", lambda trial, blocks: iter([1.0] * 119 + [last]))
    trial = Trial(seed=0, folder=tmp_path)
    assert proxies._last_loss(trial, proxies.UnitScaled, None) == math.log(256)


def test_steps_of_unit_scaled_weights_are_longer_by_the_root_of_k(tmp_path, monkeypatch):
    """Products are divided by it; so an update moves them as it moves a plain layer's."""
    monkeypatch.setattr(training, "STEPS", 1)
    trial = Trial(seed=0, folder=tmp_path)
    moved = {}
    for linear in (proxies.UnitScaled, proxies._linear):
        torch.manual_seed(0)
        layer = linear(64, 64)
        before = next(layer.parameters()).detach().clone()
        list(proxies._steps(trial, torch.nn.Sequential(layer)))
        moved[linear] = (next(layer.parameters()) - before).detach().abs().median().item()
    # Adam's first step is the rate, but for its epsilon and a decay of a hundredth of rate x weight
    assert moved[proxies.UnitScaled] / moved[proxies._linear] == pytest.approx(8, rel=0.02)


def test_the_fall_of_sqnr_is_the_first_third_less_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "STEPS", 60)
    rows = [{"statistics": number} for number in (9.0, 8.0, 5.0, 5.0, 3.0, 2.0)]
    monkeypatch.setattr(training, "_trained", lambda config: SimpleNamespace(statistics=rows))
    monkeypatch.setattr(training, "lowest_sqnr", lambda number: (number, "a layer"))
    sample = training.sqnr_as_criterion(Trial(seed=0, folder=tmp_path))
    assert sample == Sample(6.0, {"lowest SQNR": [9.0, 8.0, 5.0, 5.0, 3.0, 2.0]})


@pytest.mark.slow
def test_claims_are_measured_in_processes(tmp_path):
    names = ["post_norm_kurtosis", "mx_norm_weights"]
    measured = measuring.measure_all(names, tmp_path, jobs=2)
    assert list(measured) == names
    for name, finding in measured.items():
        assert np.isfinite(finding.interval).all()
        assert finding.verdict == recorded()[name].verdict


def test_numbers_of_other_lines_within_texts_are_those_that_were_measured():
    claims = CLAIMS

    def mean(name, line, at):
        return np.mean([sample.lines[line][at] for sample in recorded()[name].samples])

    (answer,) = claims["gradients_in_e5m2_in_training"].answers.values()
    errors = [mean("gradients_in_e5m2", fmt, 2) for fmt in ("e4m3fn", "e5m2")]
    assert "from {:.1f} % to {:.1f} %".format(*errors) in answer
    ratio = f"{training.speed():.2f} times"
    assert ratio in claims["equal_time"].method
    assert ratio in claims["batch_invariance"].answers["reproduced"]
    first, again = (
        mean("requantized_to_ue8m0", line, 0) for line in ("float32 scales", "UE8M0, from bfloat16")
    )
    text = f"UE8M0 scales makes it {100 * (again / first - 1):.1f} % larger"
    assert text in claims["requantized_to_ue8m0"].quotes["reproduced"]
    between = mean("requantized_to_ue8m0", "UE8M0 against float32 scales", 0) / 100
    assert (
        f"relative error is {between:.4f}" in (claims["requantized_to_ue8m0"].quotes["reproduced"])
    )
    never = mean("eight_random_bits", "stochastic_8", 2)
    assert f"a bias of {never:.3f} % downward" in claims["eight_random_bits"].quotes["reproduced"]
    kept = [
        mean("rowwise_outliers", "rowwise", at) - mean("rowwise_outliers", "tensorwise", at)
        for at in range(3)
    ]
    assert max(kept) < 0.1
    kl = [mean("rollout_by_ue8m0", "divergence", at) for at in (3, 4)]
    assert kl[0] / kl[1] == pytest.approx(1 / 3, abs=0.05)
    assert "a third of what bf16 costs" in claims["rollout_by_ue8m0"].answers["reproduced"]
    worst = [
        mean("double_quantization", line, 2) for line in ("from bfloat16", "from the rows' codes")
    ]
    assert worst[0] - worst[1] > 10
    assert "lose 10 dB and more" in claims["double_quantization"].quotes["reproduced"]
    one = -mean("attention_rounding_bias", "P = 1 at both", 0)
    assert f"by {one:.2f} of its RMS" in claims["attention_rounding_bias"].limits
    promoted = mean("largest_error_of_accumulation", "promoted every 128", 5)
    assert (
        f"{promoted:.1f} % with promotion"
        in (claims["largest_error_of_accumulation"].quotes["reproduced"])
    )
