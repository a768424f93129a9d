import hashlib
import math
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tomli_w

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config import config as configs
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig, RunConfig
from fp8ref.train.data import loader, windows


def config_of(
    source: Path | str,
    *,
    length: int = 8,
    batch: int = 4,
    fraction: float = 0.25,
    seed: int = 0,
    eval_batches: int = 2,
    **keys,
) -> Config:
    section = DataConfig(
        source=str(source),
        sequence_length=length,
        batch_size=batch,
        validation_fraction=fraction,
        seed=seed,
        **keys,
    )
    return Config(data=section, run=RunConfig(eval_batches=eval_batches))


def opened(source, **keys) -> loader.Batches:
    return loader.open_batches(config_of(source, **keys))


def in_validation(path: str, fraction: float = 0.25) -> bool:
    """D-1, by its words."""
    return int(hashlib.sha256(path.encode()).hexdigest()[:2], 16) < 256 * fraction


def path_in(split: str) -> str:
    """A file name that falls into a split."""
    return next(
        f"{i}.txt" for i in range(1000) if in_validation(f"{i}.txt") == (split == "validation")
    )


def counters(start: int, n: int) -> bytes:
    """Text of which any eight bytes in a row occur once."""
    return b"".join(f"{i:07d},".encode() for i in range(start, start + n))


@pytest.fixture
def marked(tmp_path):
    """60 files, each of 90 bytes of a value of its own: {byte: relative path}."""
    root = tmp_path / "marked"
    files = {
        i + 10: f"{'deep/' if i % 2 else ''}{i}.{('txt', 'md', 'py')[i % 3]}" for i in range(60)
    }
    for byte, relative in files.items():
        path = root / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([byte]) * 90)
    return root, files


@pytest.fixture
def two_files(tmp_path):
    """A training file of 65 windows of 8 and a validation file, both of counters: (directory,
    training bytes, validation bytes).
    """
    root = tmp_path / "two"
    root.mkdir()
    train, validation = counters(0, 65) + b"x", counters(5000, 40) + b"x"
    (root / path_in("train")).write_bytes(train)
    (root / path_in("validation")).write_bytes(validation)
    return root, train, validation


def starts(batches: list[np.ndarray], text: bytes) -> list[int]:
    """Where in text each window begins."""
    found = [text.find(row.astype(np.uint8).tobytes()) for batch in batches for row in batch]
    assert min(found) >= 0
    return found


def digest(batches) -> str:
    return hashlib.sha256(b"".join(batch.tobytes() for batch in batches)).hexdigest()


def test_a_batch_is_int32_windows_of_one_more_token_than_the_sequence(marked):  # D-2
    batch = opened(marked[0]).step(0)
    assert (batch.shape, batch.dtype) == ((4, 9), np.int32)
    assert opened(marked[0]).held_out(0).shape == (4, 9)


def test_fresh_instances_give_equal_batches_in_any_order_of_access(marked):  # D-2
    first, second = opened(marked[0]), opened(marked[0])
    order = [7, 0, 31, 3, 7]
    forward = {step: first.step(step) for step in sorted(order)}
    for step in order:
        np.testing.assert_array_equal(second.step(step), forward[step])


def test_200_steps_read_backwards_are_the_same_200_steps(marked):  # D-2
    first, second = opened(marked[0]), opened(marked[0])
    backwards = [second.step(step) for step in reversed(range(200))]
    assert digest(first.step(step) for step in range(200)) == digest(reversed(backwards))


def test_another_seed_gives_other_batches(marked):  # D-2
    first, second = opened(marked[0], seed=0), opened(marked[0], seed=1)
    assert digest(first.step(step) for step in range(20)) != digest(
        second.step(step) for step in range(20)
    )


def test_another_step_gives_another_batch(two_files):  # D-2
    batches = opened(two_files[0])
    assert len({batches.step(step).tobytes() for step in range(16)}) == 16


@pytest.mark.parametrize("step", [10**7, 10**12])
def test_a_late_step_is_as_near_as_the_first(marked, step):  # D-2
    batch = opened(marked[0]).step(step)
    assert batch.shape == (4, 9)
    np.testing.assert_array_equal(batch, opened(marked[0]).step(step))


@pytest.mark.parametrize("seed", [2**31, 2**32, 10**18])
def test_large_seeds_are_seeds_too(marked, seed):
    assert digest([opened(marked[0], seed=seed).step(0)]) != digest(
        [opened(marked[0], seed=0).step(0)]
    )


def test_an_epoch_holds_every_window_once(two_files):  # D-2
    root, train, _ = two_files
    batches = opened(root, batch=5)  # 65 windows in 13 batches
    assert sorted(starts([batches.step(step) for step in range(13)], train)) == list(
        range(0, 65 * 8, 8)
    )


def test_windows_overlap_by_exactly_one_token(two_files):  # D-2
    root, train, _ = two_files
    batches = opened(root, batch=5)
    rows = {
        start: row
        for step in range(13)
        for row in batches.step(step)
        for start in starts([row[None]], train)
    }
    for start in range(0, 64 * 8, 8):
        assert set(range(start, start + 9)) & set(range(start + 8, start + 17)) == {start + 8}
        assert rows[start][-1] == rows[start + 8][0] == train[start + 8]
        assert rows[start].astype(np.uint8).tobytes() == train[start : start + 9]


def test_each_epoch_has_a_shuffle_of_its_own(two_files):  # D-2
    root, train, _ = two_files
    batches = opened(root, batch=5)
    epochs = [
        starts([batches.step(13 * epoch + step) for step in range(13)], train) for epoch in range(3)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert sorted(epochs[0]) not in epochs


def test_one_seed_is_not_the_next_one_an_epoch_later(two_files):  # D-2
    root, _, _ = two_files
    later = opened(root, batch=5, seed=0)
    first = opened(root, batch=5, seed=1)
    assert digest(later.step(13 + step) for step in range(13)) != digest(
        first.step(step) for step in range(13)
    )


def test_batches_run_on_across_the_end_of_an_epoch(two_files):  # D-2
    root, train, _ = two_files
    batches = opened(root, batch=4)  # the seventeenth batch holds one window of the first epoch
    assert set(starts([batches.step(step) for step in range(17)], train)) == set(
        range(0, 65 * 8, 8)
    )


def test_files_are_split_by_the_hash_of_their_paths_alone(marked):  # D-1
    root, files = marked
    batches = opened(root, batch=1, eval_batches=20)
    read = {
        "train": {token for step in range(700) for token in np.unique(batches.step(step)).tolist()},
        "validation": {
            token for i in range(150) for token in np.unique(batches.held_out(i)).tolist()
        },
    }
    held_out = {byte for byte, path in files.items() if in_validation(path)}
    assert read == {"train": files.keys() - held_out, "validation": held_out}
    assert read["validation"]


def test_the_built_in_corpus_is_the_standard_library_less_tests_and_packages():  # D-1
    batches = opened("stdlib", length=512, batch=16, fraction=0.1)
    root = Path(sysconfig.get_path("stdlib"))
    texts = {"train": b"", "validation": b""}
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - left_out
        paths += [
            Path(folder, name).relative_to(root).as_posix()
            for name in names
            if name.endswith(".py")
        ]
    for path in sorted(paths):
        split = "validation" if in_validation(path, 0.1) else "train"
        texts[split] += (root / path).read_bytes()
    assert all(
        row.astype(np.uint8).tobytes() in texts["validation"]
        for i in range(2)
        for row in batches.held_out(i)
    )
    assert batches.description["files"] == len(paths)
    assert (
        batches.description["sha256"]
        == hashlib.sha256(texts["train"] + b"\0" + texts["validation"]).hexdigest()
    )
    # English and code lie near 3 nats, uniform bytes at 5.5
    assert 2.5 < batches.description["validation_unigram_entropy"] < 4


def test_validation_does_not_depend_on_the_seed(two_files):  # D-2
    first, second = opened(two_files[0], seed=0), opened(two_files[0], seed=9)
    for i in range(2):
        np.testing.assert_array_equal(first.held_out(i), second.held_out(i))


def test_validation_batches_differ_and_repeat(two_files):  # D-2
    root, _, validation = two_files
    batches = opened(root)
    windows = starts([batches.held_out(0), batches.held_out(1)], validation)
    assert len(set(windows)) == 8
    assert windows[:4] == starts([batches.held_out(0)], validation)


def test_a_split_is_its_files_in_the_order_of_their_relative_paths(tmp_path):  # D-1
    contents = {
        "b.txt": b"b" * 40,
        "a/z.txt": b"c" * 40,
        "a.txt": b"d" * 40,
        "a/b/c.txt": b"e" * 40,
        "Z.txt": b"f" * 40,
    }
    contents |= {f"{i}.md": bytes([i + 128]) * 40 for i in range(30)}
    for path, content in contents.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    splits = {True: b"", False: b""}
    for path in sorted(contents):
        splits[in_validation(path)] += contents[path]
    description = opened(tmp_path).description
    assert description["sha256"] == hashlib.sha256(splits[False] + b"\0" + splits[True]).hexdigest()
    assert (description["train_bytes"], description["validation_bytes"]) == (
        len(splits[False]),
        len(splits[True]),
    )
    assert description["files"] == 35


def test_only_python_markdown_and_text_is_read(two_files):
    root, _, _ = two_files
    before = opened(root).description
    (root / "image.png").write_bytes(b"\x89PNG" * 100)
    (root / "folder.txt").mkdir()
    assert opened(root).description == before


@pytest.mark.parametrize("folder", ["test", "tests", "notes"])
def test_every_folder_of_a_directory_is_read(two_files, folder):
    """Tests are left out of the built-in corpus alone (D-1)."""
    root, _, _ = two_files
    (root / folder).mkdir()
    (root / folder / "more.txt").write_bytes(counters(9000, 10))
    assert opened(root).description["files"] == 3


def test_description_names_the_source_and_its_entropy(two_files):
    root, _, validation = two_files
    description = opened(root).description
    frequencies = [validation.count(byte) / len(validation) for byte in set(validation)]
    assert description["source"] == str(root)
    assert description["validation_unigram_entropy"] == pytest.approx(
        -math.fsum(p * math.log(p) for p in frequencies), rel=1e-12
    )


@pytest.mark.parametrize(
    ("text", "entropy"),
    [
        (b"aaaa", 0.0),
        (b"abab", math.log(2)),
        (bytes(range(256)), math.log(256)),
        (b"aaab", 0.5623351446188083),
    ],
)
def test_unigram_entropy_is_in_nats(text, entropy):
    tokens = np.frombuffer(text, np.uint8)
    assert loader.unigram_entropy(tokens) == pytest.approx(entropy, rel=1e-12, abs=1e-15)


def test_every_byte_is_a_token(tmp_path):  # D-1
    (tmp_path / path_in("train")).write_bytes(bytes(range(256)) + b"\0")
    (tmp_path / path_in("validation")).write_bytes(bytes(range(256)))
    batches = opened(tmp_path, length=64, batch=1, eval_batches=1)
    tokens = np.concatenate([batches.step(step).ravel() for step in range(4)])
    assert set(tokens.tolist()) == set(range(256))


@pytest.mark.parametrize(
    ("split", "keys", "held", "needed"),
    [
        ("train", {"batch": 66}, 65, 66),
        ("train", {"length": 521}, 0, 4),
        ("validation", {"eval_batches": 11}, 40, 44),
    ],
)
def test_a_split_shorter_than_its_batches_is_refused_with_both_numbers(
    two_files, split, keys, held, needed
):
    with pytest.raises(
        ConfigError, match=f"the {split} split holds {held} sequences.*and {needed} are needed"
    ):
        opened(two_files[0], **keys)


def test_a_split_of_exactly_its_batches_is_enough(two_files):
    batches = opened(two_files[0], batch=10, eval_batches=4)
    assert batches.held_out(3).shape == (10, 9)


def test_text_without_a_validation_file_is_refused(tmp_path):
    (tmp_path / path_in("train")).write_bytes(counters(0, 100))
    with pytest.raises(ConfigError, match="validation split holds 0 sequences"):
        opened(tmp_path)


@pytest.mark.parametrize("kind", ["empty", "binary", "blank"])
def test_a_directory_without_text_is_refused(tmp_path, kind):
    if kind == "binary":
        (tmp_path / "a.png").write_bytes(b"text")
    if kind == "blank":
        (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError, match=r"holds no \.md, \.py, \.txt files"):
        opened(tmp_path)


@pytest.mark.parametrize("source", ["absent", "file.txt", ""])
def test_a_source_that_is_no_directory_is_refused(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("text")
    with pytest.raises(ValueError, match=f"'stdlib'.* a directory.*; got '{source}'"):
        opened(source)


def stored(kind: str, folder: Path) -> str:
    """4,000 sequences of 8 in a form that data.source takes, its name."""
    tokens = np.random.default_rng(0).integers(32, 127, 40000).astype(np.uint8)
    parts = np.split(tokens, 20)
    for i, part in enumerate(parts):
        if kind == "text":
            (folder / f"{i}.txt").write_bytes(part.tobytes())
        elif kind == "shards":
            part.astype("<u2").tofile(folder / f"{i}.bin")
    if kind == "parquet":
        pyarrow.parquet.write_table(
            pyarrow.table({"text": [part.tobytes().decode() for part in parts]}),
            folder / "a.parquet",
        )
    return str(folder)


@pytest.mark.parametrize("kind", ["text", "shards", "parquet"])
def test_a_row_of_1000_global_batches_is_its_sample_of_the_shuffle(tmp_path, kind):  # D-3
    source = stored(kind, tmp_path)
    batches, samples = opened(source, batch=8), opened(source, batch=1)
    assert digest(batches.step(step) for step in range(1000)) == digest(
        samples.step(i) for i in range(8000)
    )
    np.testing.assert_array_equal(
        batches.held_out(1), np.concatenate([samples.held_out(i) for i in range(8, 16)])
    )


@pytest.mark.parametrize("kind", ["text", "shards", "parquet"])
@pytest.mark.parametrize("step", [0, 1, 10**7])
def test_a_step_reads_its_own_windows_and_no_others(tmp_path, monkeypatch, kind, step):  # D-3
    batches = opened(stored(kind, tmp_path), batch=8)
    read = []
    real = windows.Windows.__getitem__
    monkeypatch.setattr(
        windows.Windows,
        "__getitem__",
        lambda self, index: (read.append(index), real(self, index))[1],
    )
    batches.step(step)
    assert len(read) == 8


def test_more_windows_than_can_be_shuffled_are_refused(marked, monkeypatch):
    monkeypatch.setattr(windows, "MOST", 100)
    with pytest.raises(
        ConfigError,
        match=r"the train split holds \d+ sequences .* 100 is the most .* Raise "
        r"data.sequence_length",
    ):
        opened(marked[0])


WITHOUT_JAX = """
import sys
from fp8ref.train.config import config
from fp8ref.train import loop
from pathlib import Path
loop.train(config.load(sys.argv[1]), "torch", Path(sys.argv[2]))
if "jax" in sys.modules:  # grain imports it
    from jax._src import xla_bridge  # jax.devices() and all else that is public would initialize what it asks for
    assert not xla_bridge.backends_are_initialized()
"""


@pytest.mark.slow
def test_a_torch_run_initializes_no_backend_of_jax(tmp_path, small):
    (tmp_path / "small.toml").write_text(tomli_w.dumps(configs.to_dict(small)))
    command = [
        sys.executable,
        "-c",
        WITHOUT_JAX,
        str(tmp_path / "small.toml"),
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


OPENED = """
import sys
from fp8ref.train.data import loader
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections.data import DataConfig
for source in sys.argv[1:]:
    loader.open_batches(Config(data=DataConfig(source=source, sequence_length=8, batch_size=4))).step(0)
print(sorted({"torch", "datasets", "tiktoken", "tokenizers"} & sys.modules.keys()))
"""


def test_opening_imports_neither_torch_nor_a_library_that_is_not_needed(tmp_path):
    sources = []
    for kind in ("text", "shards", "parquet"):
        (tmp_path / kind).mkdir()
        sources.append(stored(kind, tmp_path / kind))
    shown = subprocess.run(
        [sys.executable, "-c", OPENED, *sources],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert shown.stdout.strip() == "[]"


def test_a_mixture_takes_rows_of_each_source_by_its_weight(tmp_path):  # D-8
    for name, letter in (("a", b"a"), ("b", b"b")):
        for split in ("train", "validation"):
            path = tmp_path / name / path_in(split)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(letter * 2000)
    mixed = ((str(tmp_path / "a"), 3.0), (str(tmp_path / "b"), 1.0))
    sets = (("b", str(tmp_path / "b")),)
    batches = opened("stdlib", mixture=mixed, evaluation=sets)
    rows = np.concatenate([batches.step(i) for i in range(20)])
    assert (rows[:, 0] == ord("a")).mean() == pytest.approx(0.75, abs=1 / len(rows))
    assert {int(token) for token in batches.held_out(0)[:, 0]} == {ord("a"), ord("b")}
    assert np.all(batches.of_set("b", 0) == ord("b"))
    about = batches.description
    assert [one["weight"] for one in about["mixture"]] == [3.0, 1.0]
    assert about["evaluation"]["b"]["source"] == str(tmp_path / "b")
    assert about["sha256"] != opened("stdlib", mixture=mixed[::-1]).description["sha256"]


def test_a_set_takes_both_splits_of_its_source(tmp_path):  # D-9
    for split, letter in (("train", b"t"), ("validation", b"v")):
        path = tmp_path / path_in(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(letter * 2000)
    batches = opened(tmp_path, evaluation=(("all", str(tmp_path)),))
    seen = {int(token) for i in range(20) for token in batches.of_set("all", i)[:, 0]}
    assert seen == {ord("t"), ord("v")}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "x", "mixture": (("a", 1.0),)}, "names the sources in place of data.source"),
        ({"mixture": ()}, "at least one source"),
        ({"mixture": (("a", 0.0),)}, "weights above 0"),
        ({"evaluation": (("x", "a"), ("x", "b"))}, "names each set once"),
        ({"evaluation": (("a/b", "a"),)}, "letters, digits and underscores"),
    ],
)
def test_mixtures_and_sets_are_checked(keys, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**keys)


def test_a_set_that_is_too_short_is_named(tmp_path):
    (tmp_path / "a.py").write_bytes(b"x" * 20)
    with pytest.raises(ConfigError, match=r"data\.evaluation 'short': the whole split holds"):
        opened("stdlib", evaluation=(("short", str(tmp_path)),))


def test_a_set_may_be_all_for_validation_by_its_names(tmp_path):  # D-9
    np.save(tmp_path / "val_000.npy", np.full(2000, 7, np.uint16))
    batches = opened("stdlib", evaluation=(("held", str(tmp_path)),))
    assert np.all(batches.of_set("held", 0) == 7)
    with pytest.raises(ConfigError, match=r"data\.source '.*': every file is for validation"):
        opened(tmp_path)


@pytest.mark.parametrize("key", ["mixture", "evaluation"])
def test_the_key_of_a_source_that_cannot_be_read_is_named(tmp_path, key):
    absent = str(tmp_path / "absent")
    keys = (
        {"mixture": ((absent, 1.0),)} if key == "mixture" else {"evaluation": (("held", absent),)}
    )
    with pytest.raises(
        ConfigError, match=rf"^data\.{key} is 'stdlib' or a directory.*absent"
    ) as raised:
        opened("stdlib", **keys)
    assert "data.source" not in str(raised.value)
