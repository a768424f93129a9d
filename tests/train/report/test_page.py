import base64
import hashlib
import html
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers.training import made_runs
from helpers.training.made_runs import falling

from fp8ref.shared.errors import ConfigError
from fp8ref.train.report import page, runs, verdict

VOID = {"meta", "link", "br", "img", "hr"}
LAYERS = [f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.up_proj")]
OPERANDS = [
    "output/input",
    "output/weight",
    "grad_input/grad_output",
    "grad_input/weight",
    "grad_weight/grad_output",
    "grad_weight/input",
]


class Page(HTMLParser):
    """Well-formed HTML, or an AssertionError; text, tags, attributes and ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.ids, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.ids += [value for key, value in attributes if key == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open[-1:] not in (["style"], ["script"]):
            self.text += " " + re.sub(r"\s+", " ", text)


def statistics(**special) -> list[dict]:
    usual = {
        "amax": 2.0,
        "scale_min": 1.0,
        "scale_max": 1.0,
        "underflow_rate": 0.01,
        "saturation_rate": 0.0,
        "overflow_rate": 0.0,
    }
    usual |= {"non_finite": 0, "sqnr": 30.0}
    return [
        {
            "step": step,
            "statistics": {
                f"{layer}/{operand}": usual | (special if step == 20 else {})
                for layer in LAYERS
                for operand in OPERANDS
            },
        }
        for step in (0, 10, 20)
    ]


@pytest.fixture
def seeds(tmp_path, small):
    return made_runs.three_seeds(tmp_path, small)


@pytest.fixture
def fp8(tmp_path, small):
    def make(above=0.0, name="fp8", **keys):
        return made_runs.make(
            tmp_path / name,
            small,
            falling(above=above, wobble=0),
            **{"recipe": "tensorwise", **keys},
        )

    return make


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(runs) -> (Page, what was printed); checks what holds of every page. pictures: PNGs are
    drawn too, which takes as long again.
    """

    def make(given, pictures=False, **keys):
        if not pictures:
            monkeypatch.setattr(page.svg, "png", lambda _: b"")
        out = tmp_path / "out" / "report.html"
        out.parent.mkdir(exist_ok=True)
        said = page.write(given, out, **keys)
        text = out.read_text()
        # Nothing is asked of anywhere: no address at all, and references into the page, or data,
        # alone.
        assert not re.search("https?:", text)
        assert "default-src 'none'" in text
        assert not re.search(r"url\((?!#)", text)
        parsed = Page(text)
        assert {"link", "iframe", "img"}.isdisjoint(parsed.tags)
        assert parsed.tags.count("script") == 1
        assert all(
            value.startswith(("#", "data:image/png"))
            for key, value in parsed.attributes
            if key in ("href", "src", "xlink:href")
        )
        assert len(parsed.ids) == len(set(parsed.ids))
        assert {
            value[1:] for key, value in parsed.attributes if key == "href" and value[0] == "#"
        } <= set(parsed.ids)
        assert parsed.tags.count("svg") == len(list(out.parent.glob("*.png")))
        assert not list(out.parent.glob("*.tmp"))
        return parsed, said

    return make


@pytest.mark.parametrize(("above", "kind"), [(0.0, "equivalent"), (0.5, "worse"), (-0.5, "better")])
def test_the_page_says_the_verdict(seeds, tmp_path, small, write, above, kind):
    fp8 = [
        made_runs.make(
            tmp_path / f"fp8-{i}",
            small,
            falling(above=offset + above + i / 1000, wobble=i),
            recipe="tensorwise",
            seed=i,
            backend="torch",
        )
        for i, offset in enumerate((0.0, 0.05, -0.05))
    ]
    shown, said = write([*seeds, *fp8])
    (arm,) = verdict.judged([*seeds, *fp8])
    found = verdict.verdict(arm, [*seeds, *fp8])
    gap = found.compared.gap.last
    assert (
        f" {kind} : {gap.mean:+.4f} nats [{gap.low:+.4f}, {gap.high:+.4f}] from {seeds[0].name} "
        "over the last 5 of 60 steps" in shown.text
    )
    assert f"{arm.name}: {found.said}" in said
    assert re.search(rf"3 matched seeds\s+{kind}", shown.text)


def test_one_pair_is_said_to_be_one(seeds, fp8, write):
    shown, said = write([seeds[0], fp8()])
    assert "steps of one pair" in shown.text
    assert "(one seed; margin " in said


def test_without_bf16_there_is_no_gap(fp8, write):
    shown, said = write([fp8()])
    assert "cannot tell" in shown.text
    assert "there is no bf16 run" in said


def test_bf16_runs_alone_have_no_verdict(seeds, write):
    shown, _ = write(seeds)
    assert "There is no run here to judge" in shown.text
    assert "No run here has a linear in FP8." in shown.text


@pytest.mark.slow
def test_figures_lie_beside_the_page(seeds, fp8, write, tmp_path):
    write([*seeds, fp8(statistics=statistics())], pictures=True)
    names = {path.name.removeprefix("report-g0-") for path in (tmp_path / "out").glob("*.png")}
    metrics = {"loss.png", "gap.png", "val_loss.png", "grad_norm.png", "tokens_per_second.png"}
    maps = {f"stats0-{name}.png" for name in ("amax", "underflow_rate", "saturation_rate", "sqnr")}
    assert names == metrics | maps
    assert all(
        path.read_bytes().startswith(b"\x89PNG\r\n") for path in (tmp_path / "out").glob("*.png")
    )


def test_colors_are_variables_in_light_and_dark(seeds, fp8, write, tmp_path):
    write([*seeds, fp8()])
    text = (tmp_path / "out" / "report.html").read_text()
    assert "@media (prefers-color-scheme: dark) { :root {" in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        used = re.findall(r"(?:fill|stroke): ([^;\"]+)", svg)
        assert set(used) - {"none"} <= {value for value in used if value.startswith("var(--")}
    assert "var(--run0)" in text


def test_every_figure_is_described(seeds, fp8, write):
    shown, _ = write([*seeds, fp8()])
    assert shown.attributes.count(("role", "img")) == shown.tags.count("svg")
    assert all(value for key, value in shown.attributes if key == "aria-label")


def test_a_run_s_name_is_text(seeds, fp8, write):
    """Its directory's, but for a slash."""
    names = ["<script>alert(1)<", "a & b", "$x_{$", "_hidden", '"onload="x', "試行"]
    shown, said = write(
        [*seeds, *(fp8(i / 10, name, backend=f"of {i}") for i, name in enumerate(names))],
        pictures=True,
    )
    assert all(name in shown.text and f"{name}: " in said for name in names)
    assert "onload" not in [key for key, _ in shown.attributes]


def test_a_name_forges_no_line(tmp_path, small, capsys):
    """Neither of the page nor of the verdicts, by line ends, directions of text, formulas or
    escapes.
    """
    names = ["a\nfp8ref: equivalent", "b\u202ex", "c$\\frac$", "d\x1b[31m|x", "_e", "=f"]
    for seed, name in enumerate(names):
        config = small.replace(run={"seed": seed}, data={"seed": seed})
        made_runs.make(
            tmp_path / name, config, falling(30), recipe="bf16" if seed < 3 else "tensorwise"
        )
    said = page.write(runs.read_all([tmp_path]), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert not any(c in said + text for c in "\x1b\u202e")
    assert "\nfp8ref: equivalent" not in said + text
    assert r"a\nfp8ref: equivalent" in text


@pytest.mark.parametrize(
    ("file", "keys"),
    [
        ("manifest.json", ("linears", 0, "path")),
        ("manifest.json", ("versions", "numpy")),
        ("statistics.jsonl", ()),
    ],
    ids=str,
)
def test_a_name_in_a_file_is_of_one_line(fp8, file, keys):
    run = fp8().path
    value = (
        json.loads((run / "manifest.json").read_text())
        if keys
        else {"step": 0, "statistics": {"x\nforged/output/input": {}}}
    )
    holder = value
    for key in keys[:-1]:
        holder = holder[key]
    if keys:
        holder[keys[-1]] = "x\nforged"
    (run / file).write_text(json.dumps(value) + "\n")
    with pytest.raises(
        ConfigError, match="a name is one line, without control characters"
    ) as error:
        runs.read(run)
    assert "\nforged" not in str(error.value)


def test_statistics_that_are_not_finite_are_named(seeds, fp8, write):
    shown, _ = write([*seeds, fp8(statistics=statistics(non_finite=3, sqnr=None, amax=0.0))])
    assert f"{LAYERS[0]}/output/input: 3 non-finite elements at step 20." in shown.text


def test_a_measure_that_was_never_finite_has_no_figure(seeds, fp8, write, tmp_path):
    write(
        [
            *seeds,
            fp8(
                statistics=[
                    {
                        "step": 0,
                        "statistics": {
                            f"{LAYERS[0]}/output/input": {
                                "amax": 1.0,
                                "sqnr": None,
                                "non_finite": 0,
                            }
                        },
                    }
                ]
            ),
        ]
    )
    assert [path.name for path in (tmp_path / "out").glob("*stats*")] == [
        "report-g0-stats0-amax.png"
    ]


def test_memory_is_shown_where_it_was_recorded(seeds, fp8, write):
    shown, _ = write(
        [
            *seeds,
            fp8(more={"memory": {"peak_bytes": 3 << 29, "of": "device"}}),
            fp8(name="unknown", more={"memory": None}),
        ]
    )
    assert "peak memory" in shown.text
    assert shown.text.count("1.50 GiB of the device") == 1


def test_what_cast_is_shown_and_compared_with_the_baseline(seeds, fp8, write):
    kernels = {"cuda: H200": {"by": "triton", "reason": "the self-check passed"}}
    shown, _ = write([*seeds, fp8(more={"kernels": kernels}), fp8(name="older")])
    by_triton = "Triton kernels (the self-check passed)"
    assert f"fp8 cast tensors on cuda: H200 by {by_triton}." in shown.text
    assert "older cast" not in shown.text
    assert re.search(rf"versions.casts\s+-.*{re.escape(by_triton)}", shown.text)


def test_speed_is_next_to_bf16_of_the_same_backend(seeds, fp8, write):
    shown, _ = write([*seeds, fp8(speed=1500.0), fp8(name="alone", backend="jax", speed=3000.0)])
    row = {
        run: re.search(
            rf"{run}\s+finished\s+60\s+[\d.]+\s+[\d.]+\s+([\d,]+)\s+(\S+)", shown.text
        ).groups()
        for run in ("fp8", "alone")
    }
    assert row == {"fp8": ("1,500", "1.50x"), "alone": ("3,000", "-")}


def test_what_ran_is_shown_with_what_is_missing(seeds, fp8, write):
    line = (
        "model.layers.0.mlp.up_proj/output: planned f8e4m3fn x f8e4m3fn, fast; no GEMM of it "
        "was seen"
    )
    proof = {"read_from": "eager dispatch", "gemms": [], "missing": [line], "gathers": {"u8": 7}}
    shown, _ = write([*seeds, fp8(proof=proof)])
    assert "7 of 8 linears in FP8" in shown.text
    assert "1 missing" in shown.text
    assert line in shown.text
    assert "MISSING" in shown.text
    assert "Gathers: 7 of u8" in shown.text


def test_products_of_attention_are_counted(seeds, fp8, write):  # B-15
    products = [
        {
            "gemm": f"model.layers.0.self_attn/{p}",
            "a": a,
            "b": a,
            "accumulate": None,
            "fp8": a != "f32",
        }
        for p, a in (("scores", "f8e4m3fn"), ("values", "f32"))
    ]
    attention = {
        "variant": "cudnn",
        "gemms": products,
        "on_dequantised_operands": ["model.layers.0.self_attn/values"],
    }
    shown, _ = write(
        [
            *seeds,
            fp8(
                proof={
                    "read_from": "eager dispatch",
                    "gemms": [],
                    "missing": [],
                    "attention": attention,
                }
            ),
        ]
    )
    assert (
        "Attention by cudnn: 1 of 2 products take FP8 operands, 1 take dequantized ones."
        in shown.text
    )


def test_what_ran_under_a_schedule_is_shown_by_recipe(seeds, tmp_path, small, write):  # T-9
    phases = small.replace(
        numerics={"recipe": "bf16", "schedule": ((0, "bf16"), (20, "tensorwise"))},
        run={"steps": 60},
    )
    run = made_runs.make(tmp_path / "run", phases, falling(above=0.0, wobble=0), recipe="bf16")
    path = tmp_path / "run" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["schedule"]["ran"] == []
    manifest["schedule"]["ran"] = [[0, "bf16"], [20, "tensorwise"]]
    manifest["schedule"]["recipes"]["tensorwise"]["proof"] = {
        "read_from": "eager dispatch",
        "gemms": [],
        "missing": [],
    }
    path.write_text(json.dumps(manifest))
    run = runs.read(tmp_path / "run")
    assert not run.bf16
    shown, _ = write([*seeds, run])
    assert "ran in bf16 from step 0, tensorwise from step 20." in shown.text
    assert ", bf16: 0 of 8 linears in FP8" in shown.text
    assert ", tensorwise: 7 of 8 linears in FP8" in shown.text
    manifest["schedule"]["ran"] = [["0", "bf16"]]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"has schedule\.ran\.0\.0 = \"0\""):
        runs.read(tmp_path / "run")


def test_what_differs_from_the_baseline_is_a_table(seeds, fp8, write):
    shown, _ = write([fp8(backend="jax"), *seeds])
    assert f"Differences from the baseline, {seeds[0].name}" in shown.text
    assert re.search(r"numerics\.recipe\s+bf16\s+tensorwise\s+bf16\s+bf16", shown.text)
    assert re.search(r"backend\s+torch\s+jax\s+torch\s+torch", shown.text)
    assert shown.text.count("model.hidden_size") == 1  # among all keys of the baseline alone
    assert f"All keys of {seeds[0].name}, the baseline" in shown.text


def test_the_worst_ten_layers_are_a_table(seeds, fp8, write):
    worse = [
        {
            "step": 0,
            "statistics": {
                f"layer{i:02}/output/input": {"amax": 1.0, "sqnr": 20.0 + i} for i in range(12)
            },
        }
    ]
    shown, _ = write([*seeds, fp8(statistics=worse)])
    assert "The ten worst layers" in shown.text
    assert re.search(r"layer00\s+output/input\s+20\.0\s+0\s+20\.0", shown.text)
    table = shown.text[: shown.text.index("Maps show layers")]
    assert "layer09" in table
    assert "layer10" not in table


def test_the_script_has_the_values_that_figures_show(seeds, fp8, write):
    shown, _ = write([*seeds, fp8(statistics=statistics())])
    of = [json.loads(value) for key, value in shown.attributes if key == "data-readout"]
    assert len(of) == shown.tags.count("svg")
    losses = of[0][0]["series"][-1]
    assert losses["name"].endswith("fp8")
    assert losses["color"] == "var(--run0)"
    assert losses["x"] == list(range(4, 60))
    sqnr = next(axes for axes in of[-1] if axes)
    assert (sqnr["rows"], sqnr["values"]) == (LAYERS, [[30, 30, 30]] * 2)


def test_only_the_page_s_own_script_may_run(seeds, fp8, write, tmp_path):
    """Its policy has the hash of the bytes between <script> and </script>, and no other leave."""
    write([seeds[0], fp8()])
    text = (tmp_path / "out" / "report.html").read_bytes()
    (script,) = re.findall(rb"<script>(.*?)</script>", text, re.DOTALL)
    (policy,) = re.findall(rb'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.decode().split(";"))
    assert (
        rules.pop("script-src")
        == f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"
    )
    assert rules == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
    } | dict.fromkeys(("base-uri", "form-action"), "'none'")


HOSTILE = 'a"><img src=x onerror=document.title=1>'


def hostile(root, run):
    """A copied run whose metrics, statistics and manifest carry markup wherever a report prints
    text.
    """
    path = root / "<svg onload=document.title=2>"
    shutil.copytree(run.path, path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest |= {
        "device": HOSTILE,
        "fp8ref": HOSTILE,
        "status": HOSTILE,
        "versions": {HOSTILE: HOSTILE},
    }
    manifest["kernels"] = {HOSTILE: {"by": HOSTILE, "reason": HOSTILE}}
    manifest["linears"][0] |= {"path": HOSTILE, "recipe": HOSTILE, "reason": HOSTILE}
    manifest["proof"] = {
        "read_from": HOSTILE,
        "gemms": [],
        "missing": [HOSTILE],
        "gathers": {HOSTILE: 1},
    }
    manifest["config"]["model"][HOSTILE] = HOSTILE
    (path / "manifest.json").write_text(json.dumps(manifest))
    line = {
        "step": 0,
        "statistics": {f"{HOSTILE}/output/input": {"amax": 1.0, "sqnr": 1.0, "non_finite": 1}},
    }
    (path / "statistics.jsonl").write_text(json.dumps(line) + "\n")
    return path


def test_text_of_a_run_is_never_markup(seeds, fp8, write, tmp_path):
    shown, _ = write([seeds[0], runs.read(hostile(tmp_path, fp8()))])
    assert HOSTILE in shown.text
    assert not {key for key, _ in shown.attributes if key.startswith("on")}
    assert all(re.fullmatch(r"f\d+-\w+", value) for value in shown.ids)


@pytest.mark.parametrize("name", [HOSTILE, "a/b", "../a", "", "1.5", "a b"])
def test_a_validation_set_has_a_name(fp8, name):
    """Else it would name a figure, its ids and a file: a stored script."""
    run = fp8()
    path = run.path / "metrics.jsonl"
    line, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(
        "".join([json.dumps(json.loads(line) | {f"val_loss_{name}": 1.0}) + "\n", *rest])
    )
    with pytest.raises(
        ConfigError,
        match=r"metrics\.jsonl, step 0, has val_loss_.*a set of data\.evaluation is named by",
    ):
        runs.read(run.path)


@pytest.mark.parametrize("value", ["high", [1], None, math.nan, 1e200])
def test_a_validation_loss_of_a_set_is_a_number(fp8, value):
    run = fp8()
    path = run.path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0, "loss": 1.0, "val_loss_code": value}) + "\n")
    with pytest.raises(ConfigError, match=r"has val_loss_code = .*"):
        runs.read(run.path)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_nothing_else_runs(seeds, fp8, write, tmp_path):
    """The page's script runs; what a run's text, or a page that was changed afterwards, has does
    not.
    """
    write([seeds[0], runs.read(hostile(tmp_path, fp8()))])
    path = tmp_path / "out" / "report.html"
    planted = (
        "<img src=x onerror=document.title=3><script>document.title=4</script><a "
        "href='javascript:document.title=5'></a>"
    )
    path.write_text(path.read_text().replace("<main>", f"<main>{planted}"))
    shown = browsed(path, tmp_path)
    title = re.search(r"<title>(.*?)</title>", path.read_text())[1]
    assert html.unescape(title) in shown.text
    assert shown.tags.count("button") == 3 * shown.tags.count("svg")


def browsed(path, folder):
    """The page as chromium leaves it."""
    how = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
    ]
    ran = subprocess.run(
        [*how, path.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    return Page(ran.stdout)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_script_runs(seeds, fp8, write, tmp_path):
    write([seeds[0], fp8(statistics=statistics())])
    shown = browsed(tmp_path / "out" / "report.html", tmp_path)
    # made after every figure's values were read
    assert shown.tags.count("button") == 3 * shown.tags.count("svg")


def test_an_unfinished_run_shows_its_status_and_a_torn_line_is_left_out(
    seeds, tmp_path, small, write
):
    run = made_runs.make(
        tmp_path / "stopped",
        small,
        falling(40, wobble=0),
        recipe="tensorwise",
        status="interrupted",
    )
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')
    shown, _ = write([*seeds, runs.read(run.path)])
    assert "stopped (interrupted)" in shown.text
    assert "over the last 5 of 40 steps" in shown.text


# E-1
def test_a_run_that_another_of_its_seeds_replaces_is_named(seeds, fp8, tmp_path, small, write):
    short = made_runs.make(
        tmp_path / "a-short", small, falling(20), recipe="tensorwise", seed=0, status="interrupted"
    )
    whole = fp8()
    shown, said = write([*seeds, short, whole])
    assert (
        f"{short.name} is left out of verdicts: {whole.name} has its config and seeds."
        in shown.text
    )
    assert f"{short.name} is left out: {whole.name} has its config and seeds" in said


def test_runs_of_different_models_are_apart(seeds, tmp_path, small, write):
    other = made_runs.make(
        tmp_path / "wide", small.replace(model={"hidden_size": 64}), falling(), recipe="tensorwise"
    )
    shown, said = write([*seeds, other])
    assert "Runs 2 of 2" in shown.text
    assert "These runs have another model.hidden_size than the first" in shown.text
    assert f"{other.name}: cannot tell" in said


@pytest.mark.slow
def test_more_runs_than_colors_can_be_drawn(seeds, fp8, write):
    shown, _ = write([*seeds, *(fp8(i / 50, f"run{i}") for i in range(8))])
    assert all(f"run{i}" in shown.text for i in range(8))


def test_one_run_of_one_step_is_a_page(tmp_path, small, write):
    shown, said = write(
        [made_runs.make(tmp_path / "run", small, [5.5], recipe="tensorwise", status="running")]
    )
    assert "cannot tell" in said
    assert "run (running)" in shown.text


def test_a_foreign_file_is_left_alone(seeds, tmp_path):
    (tmp_path / "mine.html").write_text("<p>mine")
    with pytest.raises(ConfigError, match="is not a report of fp8ref; it is left alone"):
        page.write(seeds, tmp_path / "mine.html")
    assert (tmp_path / "mine.html").read_text() == "<p>mine"
    assert not list(tmp_path.glob("*.png"))


def test_a_run_whose_first_step_was_not_finite_is_outside(seeds, fp8, tmp_path, small, write):
    died = made_runs.make(
        tmp_path / "died",
        small,
        [],
        recipe="tensorwise",
        status="failed",
        more={"error": "NonFiniteError: step 0"},
    )
    for given in ([died], [*seeds, died]):
        shown, said = write(given)
        assert (
            f"{died.name}: worse: {died.name} ended at step 0, after 64 tokens, by "
            "NonFiniteError: step 0." in said
        )
        assert re.search(r"died\s+failed\s+0\s+-\s+-\s+-\s+-", shown.text)
        shutil.rmtree(tmp_path / "out")


def test_statistics_of_nothing_are_not_shown(tmp_path, small, write):
    run = made_runs.make(
        tmp_path / "bf16", small, [5.0], statistics=[{"step": 0, "statistics": {}}]
    )
    shown = write([run])[0].text
    assert "FP8 statistics" not in shown
    assert "Optimizer states" not in shown


def test_a_gradient_of_zero_is_drawn(tmp_path, small, write):
    write([made_runs.make(tmp_path / "zero", small, np.full(6, -1.0))])


def test_a_file_that_cannot_be_written_is_named(seeds, tmp_path):
    with pytest.raises(
        ConfigError, match=r"--out .* cannot be written \(File name too long\)\. Name a file"
    ):
        page.write(seeds[:1], tmp_path / ("x" * 250 + ".html"))


@pytest.mark.parametrize("out", ["absent/report.html", "."])
def test_a_place_that_is_not_there_is_refused(seeds, tmp_path, out):
    with pytest.raises(ConfigError, match="a file in a directory that exists"):
        page.write(seeds, tmp_path / out)


@pytest.mark.slow
def test_a_report_is_written_again_to_the_same_bytes(seeds, fp8, write, tmp_path):
    given = [*seeds, fp8(statistics=statistics())]
    write(given)
    shutil.copy(tmp_path / "out" / "report.html", tmp_path / "first.html")
    write(given)
    assert (tmp_path / "first.html").read_bytes() == (tmp_path / "out" / "report.html").read_bytes()


LAYER = "model.layers.0.mlp.up_proj"


def of(tmp_path, small, proof) -> dict:
    return {
        linear.path: linear
        for linear in page.fp8_coverage(
            made_runs.make(
                tmp_path / "run", small, [1.0], recipe="tensorwise", proof=proof
            ).manifest
        )
    }


def gemm(which, a="f8e4m3fn", fp8=True) -> dict:
    return {
        "gemm": f"{LAYER}/{which}",
        "a": a,
        "b": "f8e4m3fn" if fp8 else "bf16",
        "accumulate": "slow",
        "fp8": fp8,
    }


def test_a_gemm_is_what_was_seen(tmp_path, small):
    proof = {
        "read_from": "x",
        "gemms": [gemm("output"), gemm("grad_weight", "bf16", fp8=False)],
        "missing": [],
    }
    assert of(tmp_path, small, proof)[LAYER].gemms == (
        "FP8: f8e4m3fn x f8e4m3fn, slow",
        "not seen",
        "high precision: bf16 x bf16",
    )


def test_what_is_missing_dequantized_or_not_needed_is_called_so(tmp_path, small):
    proof = {
        "read_from": "x",
        "gemms": [gemm("output"), gemm("grad_input", "bf16", fp8=False)],
        "missing": [
            f"{LAYER}/output: planned f8e4m3fn x f8e4m3fn, fast; f8e4m3fn x f8e4m3fn, slow"
        ],
        "on_dequantised_operands": [f"{LAYER}/grad_input"],
        "pruned": [f"{LAYER}/grad_weight"],
    }
    assert of(tmp_path, small, proof)[LAYER].gemms == (
        "MISSING",
        "dequantized: FP8 values, high-precision GEMM",
        "not needed",
    )


def test_gemms_of_fp4_are_called_emulated(tmp_path, small):
    names = [f"{LAYER}/{which}" for which in ("output", "grad_input", "grad_weight")]
    proof = {
        "read_from": "x",
        "gemms": [],
        "missing": [],
        "on_dequantised_operands": names,
        "emulated": names,
    }
    shown = "emulated: FP4 values, high-precision GEMM"
    assert of(tmp_path, small, proof)[LAYER].gemms == (shown,) * 3


def test_without_a_proof_there_is_only_the_plan(tmp_path, small):
    found = of(tmp_path, small, None)
    assert set(found[LAYER].gemms) == {"planned, no proof recorded"}
    assert (found[LAYER].plan, found[LAYER].shape) == ("tensorwise", "48 x 32")
    assert found["lm_head"].plan == "high precision: named by filter_fqns 'lm_head'"
    assert set(found["lm_head"].gemms) == {"high precision"}


STATES = {
    "count": 400,
    "v_lost": 6,
    "bounded": 0,
    "clipped_m": 0,
    "clipped_v": 0,
    "stalled_m": 100,
    "stalled_v": 300,
}
STATES |= {
    "root_bias": 0.031,
    "update_error": 0.25,
    "largest_ratio": None,
    "bytes_per_parameter": 2.0625,
}


def test_the_health_of_states_is_a_table_and_a_figure(tmp_path, small, write):
    lines = [
        {
            "step": step,
            "statistics": {},
            "states": {
                "": STATES | {"v_lost": lost},
                "model.norm.weight": STATES | {"v_lost": lost},
            },
        }
        for step, lost in ((0, 0), (1, 6))
    ]
    config = small.replace(optimizer={"kind": "adamw_states", "layout": "te"})
    shown, _ = write(
        [made_runs.make(tmp_path / "narrow", config, [5.0, 4.0], statistics=lines)], pictures=True
    )
    for said in (
        "Optimizer states",
        "te",
        "2.062",
        "1.50 %",
        "25.00 %",
        "75.00 %",
        "0.031",
        "0.25",
        "1.50 % of model.norm.weight",
        "v stalled",
    ):
        assert said in shown.text, said
    assert "health of optimizer states" in shown.text
    assert "FP8 statistics" not in shown.text


def test_a_page_is_written_through_no_link(tmp_path):
    other, path = tmp_path / "other", tmp_path / "report.html"
    other.write_text("kept")
    (tmp_path / "report.html.tmp").symlink_to(other)
    page._put(path, b"page")
    assert (other.read_text(), path.read_text(), path.is_symlink()) == ("kept", "page", False)
