import errno
import hashlib
import json
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import datasets
import numpy as np
import pytest
from helpers.models.tokenizing import install_tiktoken, write_words

from fp8ref import cli
from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig, RunConfig
from fp8ref.train.data import documents, loader, prepare, sidecar

TEXTS = [f"fp8 {'amax ' * (i % 5)}bits" for i in range(100)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def make(source, out, *, shard_tokens=10**6, hf_split=None, **keys):
    config = DataConfig(source=str(source), validation_fraction=0.25, **keys)
    return prepare.prepare(config, out, shard_tokens=shard_tokens, hf_split=hf_split)


def opened(source, **keys) -> loader.Batches:
    section = DataConfig(
        source=str(source), sequence_length=8, batch_size=2, validation_fraction=0.25, **keys
    )
    return loader.open_batches(
        Config(model=LlamaConfig(), data=section, run=RunConfig(eval_batches=1))
    )


def contents(folder) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("kind", ["text", "documents"])
def test_training_from_shards_is_training_from_their_source(tmp_path, text, source, kind):  # D-7
    source = text if kind == "text" else source
    make(source, tmp_path / "out")
    one, two = opened(source), opened(tmp_path / "out")
    for k in (0, 1, 77, 10**7):
        np.testing.assert_array_equal(one.step(k), two.step(k))
    np.testing.assert_array_equal(one.held_out(0), two.held_out(0))


def test_shards_and_what_is_said_of_them(tmp_path, source):  # D-7
    words = str(write_words(tmp_path / "tokenizer.json"))
    made = make(
        source, tmp_path / "out", tokenizer=words, end_of_document="<|end|>", shard_tokens=60
    )
    splits = {"train": [], "val": []}
    for text in TEXTS:
        held_out = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) < 2**62
        splits["val" if held_out else "train"] += [
            ["fp8", "amax", "scale", "bits"].index(word) for word in text.split()
        ] + [5]
    expected = {"shards.json"}
    for split, tokens in splits.items():
        for i in range(0, len(tokens), 60):
            name = f"{split}-{i // 60:05d}.bin"
            expected.add(name)
            content = (tmp_path / "out" / name).read_bytes()
            assert content == np.array(tokens[i : i + 60], "<u2").tobytes()
            assert made.files[name].tokens == len(content) // 2
            assert made.files[name].sha256 == hashlib.sha256(content).hexdigest()
            assert made.files[name].sample == sidecar.sample(tmp_path / "out" / name)
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected
    said = json.loads((tmp_path / "out" / "shards.json").read_text())
    assert (
        said["tokenizer"],
        said["vocab_size"],
        said["end_of_document"],
        said["max_id"],
        said["dtype"],
    ) == (words, 6, 5, 5, "uint16")
    # the short shards at the ends hold fewer windows, and are no error
    assert opened(tmp_path / "out").step(0).max() <= 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source.jsonl", "tokenizer.json"]


def test_a_large_vocabulary_takes_32_bits(tmp_path, source):  # D-7
    content = json.loads(write_words(tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["bits"] = 65536
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    made = make(
        source, tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"), end_of_document=""
    )
    assert (made.dtype, made.max_id, made.vocab_size) == ("uint32", 65536, 65537)
    assert 65536 in np.fromfile(tmp_path / "out" / "train-00000.bin", "<u4")


def test_tiktoken(tmp_path, source, monkeypatch):
    for _ in install_tiktoken(tmp_path, monkeypatch):
        made = make(source, tmp_path / "out", tokenizer="tiktoken:tiny")
    assert (made.vocab_size, made.end_of_document, made.max_id) == (301, 300, 300)
    assert np.fromfile(tmp_path / "out" / "train-00000.bin", "<u2")[:2].tolist() == [256, ord("8")]


class Stream:
    """What datasets.load_dataset gives when streaming; ``fails`` is the row at which the network
    does.
    """

    def __init__(self, fails=None):
        self.fails, self.asked = fails, []

    def __call__(self, name, config, *, split, streaming):
        self.asked.append((name, config, split, streaming))

        def rows():
            for i, text in enumerate(TEXTS):
                if i == self.fails:
                    raise ConnectionError("reset")
                yield {"text": text}

        return datasets.IterableDataset.from_generator(rows)


@pytest.mark.parametrize(("name", "config"), [("org/name", None), ("org/name:en", "en")])
def test_the_hub_is_streamed(tmp_path, source, monkeypatch, name, config):  # D-6
    stream = Stream()
    monkeypatch.setattr(datasets, "load_dataset", stream)
    make(f"hf:{name}", tmp_path / "hub", hf_split="part")
    make(source, tmp_path / "local")
    assert stream.asked == [("org/name", config, "part", True)]
    hub, local = contents(tmp_path / "hub"), contents(tmp_path / "local")
    assert {k: v for k, v in hub.items() if k != "shards.json"} == {
        k: v for k, v in local.items() if k != "shards.json"
    }


def test_a_stream_is_not_held_in_memory(tmp_path, monkeypatch):
    """Of 48 MiB of documents, 96 MiB of tokens, a batch at a time: that of 1 MiB in a few copies
    and types.
    """
    texts = ({"text": f"{i:02}" * 2**19} for i in range(48))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: texts)
    tracemalloc.start()
    try:
        made = make("hf:org/name", tmp_path / "out", shard_tokens=10**7)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(file.tokens for file in made.files.values()) == 48 * (2**20 + 1)
    assert peak < 16 * 2**20


def test_a_stream_that_breaks_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", Stream(fails=40))
    with pytest.raises(
        ConfigError,
        match=r"'hf:org/name', split 'train': datasets cannot stream it after 40 rows "
        r"\(ConnectionError: reset\)",
    ):
        make("hf:org/name", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_the_hub_does_not_know_is_said(tmp_path, monkeypatch):
    def load(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("doesn't exist")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        ConfigError, match=r"cannot stream it \(DatasetNotFoundError: doesn't exist\)"
    ):
        make("hf:org/name", tmp_path / "out")


def test_the_hub_without_datasets_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError,
        match=r"data.source 'hf:org/name' needs datasets .*pip install 'fp8ref\[data\]'",
    ):
        make("hf:org/name", tmp_path / "out")


def test_a_directory_that_holds_something_is_left_alone(tmp_path, source):
    make(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        make(source, tmp_path / "out")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        make(source, source)
    assert contents(tmp_path / "out") == before


def test_an_empty_directory_is_filled_and_missing_parents_are_made(tmp_path, source):
    (tmp_path / "empty").mkdir()
    make(source, tmp_path / "empty")
    make(source, tmp_path / "a" / "b")
    assert contents(tmp_path / "empty") == contents(tmp_path / "a" / "b")


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), ConfigError("line 3"), OSError(errno.ENOSPC, "No space left on device")],
)
def test_what_stops_it_leaves_nothing(tmp_path, source, monkeypatch, error):
    def tokenized(*_):
        yield False, np.arange(100, dtype=np.uint16)
        raise error

    monkeypatch.setattr(documents, "tokenized", tokenized)
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else ConfigError):
        make(source, tmp_path / "out", shard_tokens=30)
    assert [path.name for path in tmp_path.iterdir()] == ["source.jsonl"]


LIMITED = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)); from "
    "fp8ref.cli import main; sys.exit(main(sys.argv[1:]))"
)


def test_a_disk_that_takes_no_more_is_a_user_s_error(tmp_path, source):
    """The operating system refuses what goes beyond 300 bytes of a file, as it refuses what a full
    disk has no room for.
    """
    command = [
        sys.executable,
        "-B",
        "-c",
        LIMITED,
        "data",
        "prepare",
        "--source",
        str(source),
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"fp8ref data prepare: --out {tmp_path / 'out'} cannot be written (File too large); no file of "
        "it is kept. Free space, or name another.\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source.jsonl"]


SLOW = """
import sys, time
from fp8ref.train.data import documents
real = documents.read
def read(*a, **k):
    for i, document in enumerate(real(*a, **k)):
        if i % 10 == 9:
            print(i, flush=True)
            time.sleep(60 if i > 40 else 0)
        yield document
documents.read, documents.MEBIBYTE = read, 1
from fp8ref.cli import main
sys.exit(main(sys.argv[1:]))
"""


def ended_by(sent: signal.Signals, source, out) -> tuple[int, str]:
    """The exit code and what is said of a prepare that gets a signal in the middle of its work."""
    command = [
        sys.executable,
        "-c",
        SLOW,
        "data",
        "prepare",
        "--source",
        source,
        "--out",
        out,
        "--shard-tokens",
        "50",
    ]
    with subprocess.Popen(
        [str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while process.stdout.readline() != "49\n":
                assert process.poll() is None
            process.send_signal(sent)
            said = process.communicate(timeout=30)[1]
        finally:
            process.kill()
    return process.returncode, said


def test_sigterm_ends_it_and_leaves_nothing(tmp_path, source):  # D-7
    out = tmp_path / "out"
    assert ended_by(signal.SIGTERM, source, out) == (
        143,
        f"stopped by SIGTERM; {out} was not written\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source.jsonl"]


# D-7
def test_a_kill_leaves_nothing_that_passes_for_complete_and_the_next_removes_it(tmp_path, source):
    ended_by(signal.SIGKILL, source, tmp_path / "out")
    left = [path for path in tmp_path.rglob("*") if path.suffix == ".bin"]
    assert left  # it was killed in the middle of its work
    assert not list(tmp_path.rglob("shards.json"))
    assert not (tmp_path / "out").exists()
    others = [tmp_path / name for name in (".out.precious", ".out.v2.abcdefgh", ".other.abcdefgh")]
    for path in others:
        path.mkdir()
    with prepare.hidden_folder(tmp_path / "out") as written:  # by another process
        make(source, tmp_path / "out")
        assert sorted(tmp_path.iterdir()) == sorted([*others, written, tmp_path / "out", source])


@pytest.mark.parametrize("out", ["link", "."])
def test_a_directory_that_cannot_be_replaced_is_refused_before_anything_is_read(
    tmp_path, source, monkeypatch, out
):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    monkeypatch.chdir(tmp_path / "target")
    monkeypatch.setattr(documents, "read", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(
        ConfigError, match=rf"--out .*{out} cannot be written \(.*\); no file of it is kept"
    ):
        make(source, Path(out) if out == "." else tmp_path / out)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "source.jsonl", "target"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"shard_tokens": 1}, "--shard-tokens is at least 2.*got 1"),
        ({"hf_split": "train"}, "--hf-split names a split of a --source hf:org/name; got 'train'"),
        ({"tokenizer": "absent.json"}, "cannot be read as a tokenizer.json"),
        ({"text_column": "body"}, "has no column 'body'"),
    ],
)
def test_what_cannot_be_prepared_is_refused(tmp_path, source, keys, said):
    with pytest.raises(ConfigError, match=said):
        make(source, tmp_path / "out", **keys)
    assert [path.name for path in tmp_path.iterdir()] == ["source.jsonl"]


def test_shards_are_not_prepared_again(tmp_path, source):
    make(source, tmp_path / "out")
    with pytest.raises(ConfigError, match="is token shards already"):
        make(tmp_path / "out", tmp_path / "again")


@pytest.mark.parametrize("content", ["", '{"text": ""}\n'], ids=["empty", "blank"])
def test_a_source_without_text_is_refused(tmp_path, content):
    (tmp_path / "source.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="holds no text for training"):
        make(tmp_path / "source.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_bar_counts_the_source_s_bytes(tmp_path, source, monkeypatch):
    seen = []
    bar = console.bar

    def recording(title, total, *, shown):
        assert shown is True
        seen.append((title, total))
        manager = bar(title, total)
        advance = manager.__enter__()

        class Recorded:
            def __enter__(self):
                return lambda note, by: (seen.append((note, by)), advance(note, by))

            def __exit__(self, *error):
                return manager.__exit__(*error)

        return Recorded()

    monkeypatch.setattr(console, "bar", recording)
    monkeypatch.setattr(documents, "MEBIBYTE", 100)
    make(source, tmp_path / "out")
    total = source.stat().st_size // 100
    assert seen[0] == ("tokenizing, MiB", total)
    assert sum(by for _, by in seen[1:]) == total
    assert seen[-1][0] == f"{sum(len(t) + 1 for t in TEXTS):,} tokens"


def test_the_command(tmp_path, source, capfd, monkeypatch):
    # with these rich takes anything for a terminal
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    out = tmp_path / "out"
    arguments = [
        "data",
        "prepare",
        "--source",
        source,
        "--out",
        out,
        "--validation-fraction",
        "0.25",
        "--shard-tokens",
        "500",
    ]
    assert cli.main([str(a) for a in arguments]) == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    files = {path.name: path.stat().st_size // 2 for path in out.glob("*.bin")}
    counts = [
        sum(n for name, n in files.items() if name.startswith(split)) for split in ("train", "val")
    ]
    assert shown.out.splitlines() == [
        f"{out}: {counts[0]:,} tokens for training, {counts[1]:,} for validation, uint16, in "
        f"{len(files)} files",
        f"next: fp8ref train CONFIG --data.source {out} --model.vocab_size 256",
    ]
    assert max(files.values()) == 500


def test_ctrl_c_exits_with_130_and_says_that_nothing_is_kept(tmp_path, source, capfd, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(documents, "read", interrupted)
    assert (
        cli.main(["data", "prepare", "--source", str(source), "--out", str(tmp_path / "out")])
        == 130
    )
    assert capfd.readouterr() == ("", f"interrupted; {tmp_path / 'out'} was not written\n")
    assert [path.name for path in tmp_path.iterdir()] == ["source.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["data"], 2), (["data", "--help"], 0), (["data", "prepare", "--help"], 0)],
)
def test_help(capfd, arguments, code):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == code
    said = "usage: fp8ref data" if code == 0 else "fp8ref data: needs prepare; got none."
    assert "".join(capfd.readouterr()).startswith(said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--out", "x"], "--source"),
        (["--source", "stdlib"], "--out"),
        (["--source", "absent", "--out", "x"], "'absent', which is not a directory"),
        (
            ["--source", "stdlib", "--out", "x", "--validation-fraction", "2"],
            "data.validation_fraction must be between 0 and 1; got 2.0",
        ),
        (["--source", "stdlib", "--out", "x", "--vocab"], "unknown option '--vocab'"),
    ],
)
def test_a_command_that_cannot_be_used_exits_with_2(tmp_path, monkeypatch, capfd, options, said):
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(["data", "prepare", *options])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert said in capfd.readouterr().err
    assert list(Path().iterdir()) == []
