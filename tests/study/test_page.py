import base64
import hashlib
import html
import json
import re

import numpy as np
import pytest
import torch

from fp8ref import study
from fp8ref.study import depth_error
from fp8ref.study.depth_error import Seen
from fp8ref.study.recording import Attended, Operand, Recording


@pytest.fixture(scope="module")
def judged():
    made, rng = Recording(framework="torch"), np.random.default_rng(0)
    for layer in ("first", "<last>"):
        for role, shape in (("input", (128, 64)), ("weight", (32, 64))):
            x = rng.standard_normal(shape).astype(np.float32)
            made.operands[f"{layer}/{role}"] = Operand(
                kept=x, amax=np.abs(x).max(), columns=np.abs(x).max(axis=0), rows=len(x)
            )
    return study.judge(made, ["tensorwise", "mxfp8"])


@pytest.fixture(scope="module")
def depth():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    operand = Operand(kept=x, amax=x.max(), columns=x.max(axis=0), rows=2)
    first = Seen({"first": operand, "<last>": operand}, x, 0)

    def under(recipe):
        if recipe.in_blocks:
            raise ValueError("no blocks here")
        other = Operand(kept=1.01 * x, amax=x.max(), columns=x.max(axis=0), rows=2)
        return Seen({"first": operand, "<last>": other}, 1.01 * x, 2)

    return depth_error.compare(first, first, under, None)


def test_the_page_shows_both(judged, depth, tmp_path):
    study.write_page(tmp_path / "study.html", judged, depth)
    page = (tmp_path / "study.html").read_text()
    assert not re.search("https?:", page)
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in page
    (through,) = json.loads(html.unescape(re.search(r'data-readout="([^"]*)"', page)[1]))
    assert through["points"] == ["first", "<last>"]
    assert {one["name"] for one in through["series"]} == set(depth.outcomes)
    assert page.count("<svg") == 3  # error through depth, input, weight; no gradients were recorded
    assert "&lt;last&gt;" in page
    assert "<last>" not in page
    assert "mxfp8 did not run:</span> no blocks here" in page
    assert "Not recorded:</span> first/grad_output, &lt;last&gt;/grad_output" in page
    assert "1.000 %" in page
    worst = judged.worst(1)[0]
    assert (
        f'<td class="number">{worst.sqnr:.1f}</td><td class="number">{worst.median:.1f}</td><td '
        f'class="number">{worst.low:.1f}</td>' in page
    )
    of_model, of_casts = (
        one.replace("'", "&#39;") for one in (depth.sentence(), judged.sentence())
    )
    assert page.index(of_casts) < page.index(of_model) < page.index("<section>")
    assert "SQNR of input, 5th percentile of tokens" in page
    assert "Each number is the worse of the two GEMMs" in page


def test_the_page_of_tensors_begins_with_what_matters(tmp_path):
    x = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
    x[7] *= 30_000
    judged = study.judge(study.tensors({"up.input": x, "bias": x[0]}), ["tensorwise", "rowwise"])
    study.write_page(tmp_path / "study.html", judged)
    page = (tmp_path / "study.html").read_text()
    assert (
        "<h1>What FP8 does to 1 tensor</h1>\n<p>tensorwise zeroes 20 % of up.input because token 7"
        in page
    )
    assert "Not judged:</span> bias (shape" in page
    assert page.count("<svg") == 2
    assert "<figcaption>Zeroed of input</figcaption>" in page
    (_, zeroed) = map(json.loads, map(html.unescape, re.findall(r'data-readout="([^"]*)"', page)))
    assert zeroed[0]["what"] == "zeroed, %"
    np.testing.assert_allclose(
        zeroed[0]["values"], 100 * judged.by_layer("input", "lost"), rtol=1e-4
    )


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 256), torch.nn.Linear(256, 128)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def test_a_token_that_owns_the_norm_ranks_no_recipe_first(tmp_path):
    """The example of docs/how-to/study.md: tensorwise has the smaller error of the result, and loses
    15 % of an input, which changes the other tokens most."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(128, 512)).bfloat16()
    x = torch.randn(2, 512, 128).bfloat16()
    x[0, 7] *= 30_000
    with study.record(model) as recording:
        model(x).float().logsumexp(-1).mean().backward()
    judged = study.judge(recording, ["tensorwise", "rowwise"])
    depth = study.depth(model, lambda model: model(x), ["tensorwise", "rowwise"])
    assert depth.outcomes["tensorwise"].output < depth.outcomes["rowwise"].output
    assert list(depth.outcomes) == ["rowwise", "tensorwise"]
    study.write_page(tmp_path / "study.html", judged, depth)
    page = (tmp_path / "study.html").read_text()
    assert (
        "<p>tensorwise zeroes 15 % of the input of 0.up because token 7 is 31,000x larger" in page
    )
    assert page.index(">rowwise</th>") < page.index(">tensorwise</th>")
    (worst,) = re.findall(r'aria-label="The worst ten"><table>(.*?)</table>', page, re.DOTALL)
    assert re.search(r"<td>tensorwise</td><th[^>]*>0\.up</th><td>input</td>.*15\.\d\d %", worst)


def test_the_page_takes_casts_alone(judged, tmp_path):
    study.write_page(str(tmp_path / "study.html"), judged)
    assert "Through the model" not in (tmp_path / "study.html").read_text()


def test_the_page_shows_attention_and_states(judged, tmp_path):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, 16, 32)).astype(np.float32) for heads in (2, 1, 1))
    one = Attended(layer="<first>", q=q, k=k, v=v, do=q, causal=True)
    attention = study.judge_attention(
        Recording(framework="torch", attention={"<first>": one}, refused={"x": "why"}),
        ["cudnn", "fa3"],
    )
    states = study.judge_states([{"w": v}], ["te", "float32"])
    study.write_page(tmp_path / "study.html", judged, attention=attention, states=states)
    page = (tmp_path / "study.html").read_text()
    row = attention.rows[0]
    assert f'<td class="number">{100 * row.error:.3f} %</td>' in page
    assert f'<td class="number">{row.gradients:.3%}</td>' in page
    assert "x was left out:</span> why" in page
    assert "<h2>Optimizer states</h2>" in page
    assert page.index(">float32</th>") < page.index(">te</th>")
    assert "<first>" not in page
    assert page.count("<svg") == 3  # input, weight, attention
