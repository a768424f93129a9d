"""Logs of other trainers: their own lines, as those trainers print them."""

import json
import tracemalloc

import pytest

from fp8ref.shared.errors import ConfigError
from fp8ref.train.report import foreign_logs

_AT = "[rank0]:[titan] 2025-06-10 14:01:22,123 - root - INFO - "
_COLORED = (
    "\x1b[31mstep:  1  \x1b[32mloss:  8.1387  \x1b[38;2;180;60;0mgrad_norm:  1.2345  "
    "\x1b[34mmemory:  1.37GiB(1.44%)  tps: 5,031"
)
TITAN = "".join(
    f"{_AT}{line}\n"
    for line in (
        "Training starts at step 1",
        _COLORED,
        "step: 10  loss:  7.9000  grad_norm:  1.1  memory:  1.37GiB(1.44%)  tps: 5,031",
        "validate step: 10  loss:  8.0000  memory:  1.37GiB(1.44%)",
    )
)
_REST = (
    "learning rate: 1.5E-05 | global batch size:   256 | lm loss: {} | loss scale: 1.0 | grad "
    "norm: 23.4 |"
)
MEGATRON = (
    " [2025-06-10 14:01:22] iteration        1/     500 | consumed samples:          256 | "
    + _REST.format("1.089876E+01")
    + "\n"
    " validation loss at iteration 1 | lm loss value: 1.08E+01 | lm loss PPL: 4.9E+04 |\n"
    " [2025-06-10 14:01:25] iteration        2/     500 | consumed samples:          512 | "
    + _REST.format("1.072000E+01")
    + "\n"
)


def read(path, text: str, **keys) -> dict[int, float]:
    path.write_text(text)
    return foreign_logs.read(path, **keys).losses


def test_torchtitans_console(tmp_path):
    assert read(tmp_path / "slurm-1.out", TITAN) == {1: 8.1387, 10: 7.9}


def test_megatrons_console(tmp_path):
    assert read(tmp_path / "log.txt", MEGATRON) == {1: 10.89876, 2: 10.72}


def test_a_csv_of_any_case_and_order(tmp_path):
    assert read(tmp_path / "a.csv", "time,Loss,Step\n0,2.5,3\n1,,4\n2,2.25,1\n") == {
        1: 2.25,
        3: 2.5,
    }
    assert read(tmp_path / "c.csv", "step,sample,loss\n0," + "x" * 200_000 + ",2.5\n") == {0: 2.5}
    assert read(tmp_path / "b.csv", "Step,run - train/loss\n0,2.5\n", loss="run - train/loss") == {
        0: 2.5
    }


@pytest.mark.parametrize(
    ("name", "text"), [("a.csv", "step,loss\n0,2.5\n"), ("a.jsonl", '{"step": 0, "loss": 2.5}\n')]
)
def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path, name, text):
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert foreign_logs.read(tmp_path / name).losses == {0: 2.5}


def test_json_lines_with_other_metrics_between(tmp_path):
    lines = [
        {"_step": 0, "train/loss": 3.0},
        {"_step": 0, "eval/loss": 9.0},
        {"_step": 1, "train/loss": 2.0},
    ]
    assert read(
        tmp_path / "a.jsonl",
        "".join(json.dumps(line) + "\n" for line in lines) + '{"_step": 2, "tr',
    ) == {0: 3.0, 1: 2.0}


def test_tensorboard_events_in_a_directory(tmp_path):
    from tensorboardX import SummaryWriter

    for steps in (range(3), range(2, 5)):  # resumed at step 2
        with SummaryWriter(str(tmp_path / "tb" / f"from-{steps[0]}")) as writer:
            for step in steps:
                writer.add_scalar("loss_metrics/global_avg_loss", 3.0 - step / 4, step)
                writer.add_scalar("lr", 0.5, step)
    assert foreign_logs.read(tmp_path / "tb").losses == {step: 3.0 - step / 4 for step in range(5)}
    assert foreign_logs.read(tmp_path / "tb", loss="lr").losses == dict.fromkeys(range(5), 0.5)
    with pytest.raises(
        ConfigError,
        match=r"no tag of losses; it has loss_metrics/global_avg_loss, lr\. Name one with --loss",
    ):
        foreign_logs.read(tmp_path / "tb", loss="absent")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "step,perplexity\n0,9\n",
            r"its columns are step, perplexity\. Name the loss with --loss",
        ),
        ("a.csv", "step,loss\n0,high\n", r"step = '0' with loss = 'high'; both are numbers"),
        ("a.csv", "step,loss\n0,nan\n", r"the loss of step 0 is nan; losses are finite"),
        ("a.csv", "step,loss\n0,1\n0,2\n", r"step 0 has losses 1\.0 and 2\.0"),
        ("a.jsonl", '{"step": 0\n{"step": 1, "loss": 2}\n', r"line 1, is not JSON"),
        ("a.out", "nothing of it\n", r"has no step with a loss\. A log is CSV"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path, name, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / name, text)


def test_a_log_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        foreign_logs.read(tmp_path / "absent.csv")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "step,loss\n0,2.5\n0.5,2.25\n",
            r"has step = '0\.5' with loss = '2\.25'; a step is a whole number",
        ),
        ("a.jsonl", '{"step": 1.5, "loss": 2.5}\n', "a step is a whole number"),
        ("a.csv", "step,loss\ninf,2.5\n", "a step is a whole number"),
        ("a.csv", "step,loss\n1e300,2.5\n", "a step is a whole number"),
        ("a.csv", "step,loss\n-1,2.5\n", "a step is a whole number"),
        ("a.csv", "step,loss\n9007199254740993,2.5\n", "a step is a whole number"),
        ("a.csv", "step,loss\nnan,2.5\n", "a step is a whole number"),
        ("a.jsonl", '{"step": true, "loss": 2.5}\n', "both are numbers"),
        ("a.jsonl", '{"step": 1, "loss": [2.5]}\n', "both are numbers"),
        ("a.jsonl", '{"step": 1, "loss": 1' + "0" * 400 + "}\n", "both are numbers"),
        ("a.csv", "step,loss,loss\n0,2.5,9\n", r"a\.csv has 'loss' 2 times"),
        ("a.csv", "step,Loss,loss\n0,2.5,9\n", r"a\.csv has 'loss' 2 times"),
        ("a.csv", "step,Step,loss\n0,1,9\n", r"a\.csv has 'step' 2 times"),
        ("a.jsonl", '{"step": 1, "loss": 2.5, "loss": 9}\n', "line 1, has 'loss' 2 times"),
        ("a.jsonl", '{"step": 1, "loss": 2.5, "Loss": 9}\n', "line 1, has 'loss' 2 times"),
        ("a.jsonl", '{"step": 1, "loss": ' + "[" * 100_000 + "\n", "more than 64 levels"),
        ("a.jsonl", '{"step": 1, "loss": true}\n', "both are numbers"),
        ("a.jsonl", '{"step": 1, "loss": false}\n', "both are numbers"),
        ("a.csv", "step,loss\n1,2_5\n", "both are numbers"),
        ("a.csv", "step,loss\n\u0661,2.5\n", "both are numbers"),
        (
            "a.log",
            "step: 1 loss: 2.5. x\n",
            r"has the line 'step: 1 loss: 2\.5\. x'; both are numbers",
        ),
        ("a.log", f"step: {'9' * 4000} loss: 2.5 x\n", "a step is a whole number"),
    ],
)
def test_a_log_that_cannot_be_used_is_named(tmp_path, name, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        read(tmp_path / name, text)
    assert str(error.value).startswith(str(tmp_path / name))


def test_columns_that_are_not_read_may_share_a_name(tmp_path):
    assert read(tmp_path / "a.csv", "step,loss,,,x,X\n0.0,2.5,,,1,2\n") == {0: 2.5}
    assert read(tmp_path / "b.csv", "step,loss,Loss,mine\n3,2.5,9,1.5\n", loss="mine") == {3: 1.5}


def test_keys_that_are_not_read_may_occur_twice(tmp_path):
    assert read(
        tmp_path / "a.csv", "step,loss,iter,iter,train_loss,train_loss\n0,2.5,7,8,9,9\n"
    ) == {0: 2.5}
    line = (
        '{"step": 3, "loss": 2.5, "lr": 1, "lr": 2, "Iter": 1, "iter": 2, "x": {"a": 1, "a": 2}}\n'
    )
    assert read(tmp_path / "a.jsonl", line) == {3: 2.5}


def test_a_long_number_with_a_letter_is_refused(tmp_path):
    """The search for a number is linear in its digits: by the square of them it would not end."""
    with pytest.raises(ConfigError, match=r"a\.jsonl"):
        read(tmp_path / "a.jsonl", '{"step": "' + "1" * 1_000_000 + 'x", "loss": 2.0}\n')


_LINES = "step:  1  loss:  2.5000  x\nstep:  2  loss:  2.25"


@pytest.mark.parametrize(
    ("name", "text", "losses"),
    [
        ("a.log", _LINES, {1: 2.5}),
        ("a.log", "step:  1  loss:  2.5000  x\nstep:  2  loss:  2.", {1: 2.5}),
        ("a.log", "step:  1  loss:  2.5000  x\nstep:  2  loss:  1e", {1: 2.5}),
        ("a.log", _LINES + "  gr", {1: 2.5, 2: 2.25}),
        ("a.log", _LINES + "\n", {1: 2.5, 2: 2.25}),
        ("a.csv", "step,loss\n1,2.5\n2,1e", {1: 2.5}),
        ("a.csv", "step,loss\n1,2.5\n2,2.2", {1: 2.5, 2: 2.2}),
        ("a.csv", "step,loss\n1,2.5\n2,-", {1: 2.5}),
        ("a.csv", "step,loss,lr\n1,2.5,9\n2,2", {1: 2.5}),
        ("a.csv", "loss,step\n2.5,1\n2.4,1", {1: 2.5}),
        ("a.csv", "step,loss\n1,2.5\n2,2.2\r", {1: 2.5, 2: 2.2}),
        ("a.csv", "step,loss,lr\n1,2.5,9\n2,2.2,1", {1: 2.5, 2: 2.2}),
        ("a.csv", "step,loss,text\n1,2.5,9\n2,2.2,on", {1: 2.5, 2: 2.2}),
        ("a.csv", 'step,loss,text\n1,2.5,9\n2,2.2,"a\nb', {1: 2.5, 2: 2.2}),
        ("a.jsonl", '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2', {1: 2.5}),
        ("a.jsonl", '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2}', {1: 2.5, 2: 2}),
        ("a.jsonl", '{"step": 1, "loss": 2.5, "x": "\u2028"}\r\n{"step": 2, "x": "é', {1: 2.5}),
    ],
)
def test_a_torn_last_line_is_left_out_with_a_note(tmp_path, capsys, name, text, losses):
    """Of a run that goes on; digits may follow its last number."""
    path = tmp_path / name
    path.write_bytes(text.encode()[: -1 if text.endswith("é") else None])  # cut within a character
    assert foreign_logs.read(path).losses == losses
    said = capsys.readouterr().err
    assert ("its last line or record is torn" in said.replace("\n", " ")) == (len(losses) == 1)


def test_a_log_is_read_line_by_line(tmp_path):
    rest = "x" * 1000
    for name, head, line in (
        ("a.csv", "step,loss,text\n", "{},2.5,{}\n"),
        ("a.jsonl", "", '{{"step": {}, "loss": 2.5, "text": "{}"}}\n'),
        ("a.log", "", "step: {} loss: 2.5 {}\n"),
    ):
        path = tmp_path / name
        path.write_text(head + "".join(line.format(step % 7, rest) for step in range(1000)))
        tracemalloc.start()
        assert len(foreign_logs.read(path).losses) == 7
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < path.stat().st_size / 4


def test_damage_to_tensorboard_s_events_is_seen(tmp_path, capsys):
    """Each byte of the file: its record's checksums refuse it.

    A torn last record alone is left out.
    """
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(3):
            writer.add_scalar("train/loss", 2.5 - step / 8, step, walltime=0)
    (path,) = tmp_path.glob("events*")
    content = path.read_bytes()
    whole = foreign_logs.read(tmp_path).losses
    assert whole == {0: 2.5, 1: 2.375, 2: 2.25}
    for at in range(0, len(content), 3):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        with pytest.raises(
            ConfigError, match=r"cannot be read \(the record of events.* at byte [\d,]+ is damaged"
        ):
            foreign_logs.read(tmp_path)
    for cut in (1, 5, 30):
        path.write_bytes(content[:-cut])
        assert foreign_logs.read(tmp_path).losses == {0: 2.5, 1: 2.375}
        assert "torn" in capsys.readouterr().err.replace("\n", " ")
