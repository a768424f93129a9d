import dataclasses
import json

import pytest

from fp8ref.estimate import gpu_rates
from fp8ref.estimate.gpu_rates import PUBLISHED
from fp8ref.shared.errors import ConfigError

FILE = {
    "gpu": "H200 SXM",
    "bf16": 7e14,
    "fp8": 1.3e15,
    "fp8_rowwise": 1.2e15,
    "attention": 4e14,
    "bandwidth": 4e12,
    "launch": 3e-6,
    "source": "made up",
}


def written(tmp_path, **keys):
    path = tmp_path / "ceilings.json"
    path.write_text(
        json.dumps({key: value for key, value in (FILE | keys).items() if value is not None})
    )
    return path


def test_published_ones_are_below_the_data_sheet_and_say_so():
    for name, made in PUBLISHED.items():
        assert made.gpu == gpu_rates.NAMES[name]
        assert made.bf16 == pytest.approx(0.78 * made.sheet.bf16)
        assert made.bandwidth == pytest.approx(0.92 * made.sheet.bandwidth)
        assert made.caption.startswith("Published, NOT MEASURED here: ")
    assert gpu_rates.of("h100") is PUBLISHED["h100"]


def test_measured_ones_are_read(tmp_path):
    made = gpu_rates.of("h200", written(tmp_path))
    assert dataclasses.asdict(made) == FILE
    assert (
        made.caption
        == "MEASURED: H200 SXM reaches 700 and 1300 TFLOP/s (1200 with rowwise scales), "
        "attention 400, 4.00 TB/s, 3.0 us a kernel. made up"
    )


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"fp9": 1.0}, "fp9: Unexpected keyword argument"),
        ({"measured": True}, "measured: Unexpected keyword argument"),
        ({"bf16": None}, "bf16: Field required"),
        ({"bf16": "7e14"}, "bf16: Input should be a valid number"),
        (
            {"bf16": 700.0},
            "bf16 is in FLOP a second, from 1 % to 100 % of the data sheet's 9.9e\\+14; got 700",
        ),
        ({"fp8": 2e15}, "fp8 is in FLOP a second"),
        ({"bandwidth": 4.0}, "bandwidth is in bytes a second"),
        ({"launch": 2.0}, "launch is in seconds"),
        ({"gpu": "A100"}, "gpu is one of H100 SXM, H200 SXM, B200; got 'A100'"),
        ({"gpu": "H100 SXM", "bandwidth": 3e12}, "holds rates of H100 SXM, but --gpu is h200"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path, keys, said):
    with pytest.raises(ConfigError, match=f"ceilings.json: .*{said}"):
        gpu_rates.of("h200", written(tmp_path, **keys))


def test_what_is_no_file_or_no_json_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        gpu_rates.of("h200", tmp_path / "none.json")
    (tmp_path / "text.json").write_text("700 TFLOP/s")
    with pytest.raises(ConfigError, match=r"text\.json: not a file of measured rates"):
        gpu_rates.of("h200", tmp_path / "text.json")


def test_not_a_number_is_no_rate():
    with pytest.raises(ValueError, match="bf16 is in FLOP a second"):
        dataclasses.replace(PUBLISHED["h100"], bf16=float("nan"))


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ConfigError, match="--gpu is one of h100, h200, b200; got 'b300'"):
        gpu_rates.of("b300")
