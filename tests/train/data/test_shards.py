import hashlib
import json
import struct
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest

from fp8ref.shared import console
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig, RunConfig
from fp8ref.train.data import loader, shards, sidecar

LENGTH = 8


def opened(
    source, *, vocab_size: int = 512, fraction: float = 0.25, batch: int = 1, **keys
) -> loader.Batches:
    return loader.open_batches(
        Config(
            model=LlamaConfig(vocab_size=vocab_size),
            data=DataConfig(
                source=str(source),
                sequence_length=LENGTH,
                batch_size=batch,
                validation_fraction=fraction,
                **keys,
            ),
            run=RunConfig(eval_batches=1),
        )
    )


def windows_of(dataset, n: int) -> set[tuple[int, ...]]:
    return {tuple(dataset[i].tolist()) for i in range(n)}


def cut(tokens) -> list[tuple[int, ...]]:
    """D-2, by its words."""
    return [
        tuple(int(t) for t in tokens[i : i + LENGTH + 1])
        for i in range(0, len(tokens) - LENGTH, LENGTH)
    ]


TOKENS = np.arange(300, 400)


@pytest.fixture
def folder(tmp_path):
    """Four shards, one of each way to write them, of 25 tokens each: 3 windows, and nothing
    over.
    """
    parts = np.split(TOKENS, 4)
    parts[0].astype("<u2").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", parts[1].astype("<u4"))
    np.save(tmp_path / "c.npy", parts[2].astype(">u2"))
    header = struct.pack("<3i", 20240801, 7, 25).ljust(1024, b"\0")
    (tmp_path / "d.bin").write_bytes(header + parts[3].astype("<u4").tobytes())
    return tmp_path


def test_each_format_is_read_and_no_window_crosses_files(folder):  # D-4
    batches = opened(folder, fraction=0.34)
    expected = [cut(part) for part in np.split(TOKENS, 4)]
    assert windows_of(batches.train, 8) == {w for part in expected for w in part[:-1]}
    assert windows_of(batches.validation, 4) == {part[-1] for part in expected}
    assert (batches.step(0).shape, batches.step(0).dtype) == ((1, 9), np.int32)


def test_what_a_file_has_over_is_left_out(tmp_path):  # D-4
    # three windows, and seven tokens
    np.arange(4 * LENGTH).astype("<u2").tofile(tmp_path / "a.bin")
    assert windows_of(opened(tmp_path, fraction=0.34).train, 2) == set(
        cut(np.arange(4 * LENGTH))[:2]
    )


def test_llm_c_header_of_16_bits(tmp_path):  # D-4
    header = struct.pack("<3i", 20240520, 1, 25).ljust(1024, b"\0")
    (tmp_path / "a.bin").write_bytes(header + np.arange(25).astype("<u2").tobytes())
    assert opened(tmp_path, fraction=0.34).description["tokens"] == 25


def test_the_last_windows_of_each_file_are_validation(tmp_path):  # D-5
    for name in ("a", "b"):
        (np.arange(81) + (100 if name == "b" else 0)).astype("<u2").tofile(tmp_path / f"{name}.bin")
    batches = opened(tmp_path, fraction=0.25)  # floor(10 * 0.25) of each
    a, b = cut(np.arange(81)), cut(np.arange(100, 181))
    assert windows_of(batches.train, 16) == {*a[:8], *b[:8]}
    assert windows_of(batches.validation, 4) == {*a[8:], *b[8:]}


def test_files_named_val_are_validation(tmp_path):  # D-5
    np.arange(81).astype("<u2").tofile(tmp_path / "train.bin")
    np.arange(100, 181).astype("<u2").tofile(tmp_path / "val.bin")
    batches = opened(tmp_path, batch=10)
    assert windows_of(batches.train, 10) == set(cut(np.arange(81)))
    assert windows_of(batches.validation, 10) == set(cut(np.arange(100, 181)))


def test_the_type_of_bin_files_may_be_stated(tmp_path):
    np.arange(100).astype("<u4").tofile(tmp_path / "a.bin")
    assert opened(tmp_path, token_dtype="uint32").description["tokens"] == 100


def write_bin(path, dtype, n=100):
    (np.arange(n) % 200 + 300).astype(dtype).tofile(path)


@pytest.mark.parametrize(
    ("write", "keys", "said"),
    [
        (lambda p: (p / "a.bin").touch(), {}, r"a\.bin is empty"),
        (
            lambda p: write_bin(p / "a.bin", "<u2", 8),
            {},
            r"a\.bin holds 8 tokens, and a window is .* = 9.*\(D-4\)",
        ),
        (
            lambda p: (p / "a.bin").write_bytes(bytes(101)),
            {},
            r"a\.bin is 101 bytes, which is not a whole number of uint16",
        ),
        (
            lambda p: write_bin(p / "a.bin", "<u2", 101),
            {"token_dtype": "uint32"},
            r"a\.bin is 202 bytes, .* of uint32",
        ),
        (
            lambda p: write_bin(p / "a.bin", "<u4"),
            {},
            r"every second token is 0.*data.token_dtype to 'uint32'",
        ),
        (
            lambda p: write_bin(p / "a.bin", "<u2"),
            {"token_dtype": "uint32"},
            r"token 0 \(byte 0\) is \d+, and model.vocab_size is 512",
        ),
        (
            lambda p: np.save(p / "a.npy", np.arange(50)),
            {},
            r"a\.npy holds int64 of shape \(50,\); a shard is uint16",
        ),
        (
            lambda p: np.save(p / "a.npy", np.ones((5, 20), "u2")),
            {},
            r"holds uint16 of shape \(5, 20\)",
        ),
        (lambda p: np.save(p / "a.npy", np.ones(50, "f4")), {}, r"holds float32"),
        (
            lambda p: np.save(p / "a.npy", np.array([{}] * 50, object)),
            {},
            r"a\.npy holds object of shape",
        ),
        (
            lambda p: (np.savez(p / "a", a=np.ones(50, "u2")), (p / "a.npz").rename(p / "a.npy")),
            {},
            r"a\.npy is a \.npz archive under another name",
        ),
        (
            lambda p: (p / "a.npy").write_bytes(b"not numpy's"),
            {},
            r"a\.npy is not a complete .npy file",
        ),
        (
            lambda p: np.save(p / "a.npy", np.ones(50, "u2")),
            {"token_dtype": "uint32"},
            "data.token_dtype is uint32, and .*a.npy holds uint16",
        ),
        (lambda p: (p / "a.bin").symlink_to("absent"), {}, r"a\.bin cannot be read \(No such file"),
        (
            lambda p: (p / "a.bin").write_bytes(
                struct.pack("<3i", 20240520, 1, 99).ljust(1024, b"\0") + bytes(196)
            ),
            {},
            r"a\.bin is 1220 bytes; its llm.c header, with 99 tokens, requires 1222",
        ),
        (
            lambda p: write_bin(p / "val.bin", "<u2"),
            {},
            r"every file is for validation by its name, such as 'val\.bin' \(D-5\)",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, write, keys, said):
    write(tmp_path)
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path, **keys)


def test_a_truncated_npy_is_named(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(5000, "u2"))
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content[:-100])
    with pytest.raises(ConfigError, match=r"a\.npy is not a complete .npy file"):
        opened(tmp_path)


def test_bytes_behind_the_tokens_of_an_npy_are_no_tokens(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(5000, "u2"))
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content * 2)  # as by `cat`: the second header would be tokens
    with pytest.raises(
        ConfigError, match=r"a\.npy has more bytes than its 5000 tokens, which its header states"
    ):
        opened(tmp_path)


@pytest.mark.parametrize("shape", ["(100", "(True,)", f"({10**30},)"])
def test_an_npy_with_a_damaged_header_is_named(tmp_path, shape):
    """NumPy raises TokenError, TypeError and OverflowError of these."""
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    (tmp_path / "a.npy").write_bytes(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(200)
    )
    with pytest.raises(ConfigError, match=r"a\.npy is not a complete .npy file"):
        opened(tmp_path)


def test_the_stated_type_is_not_doubted(tmp_path):
    write_bin(tmp_path / "a.bin", "<u4")
    assert opened(tmp_path, token_dtype="uint16").description["tokens"] == 200


@pytest.mark.parametrize("at", [0, 99, 170])
# D-4
def test_a_token_beyond_the_vocabulary_is_found_before_training_with_its_place(
    tmp_path, monkeypatch, at
):
    monkeypatch.setattr(shards, "SCANNED", 64)
    write_bin(tmp_path / "a.bin", "<u2", 200)
    write_bin(tmp_path / "b.bin", "<u2", 200)
    with (tmp_path / "b.bin").open("r+b") as file:
        file.seek(2 * at)
        file.write(struct.pack("<H", 512))
    with pytest.raises(
        ConfigError,
        match=rf"b\.bin: token {at} \(byte {2 * at}\) is 512, and model.vocab_size is 512",
    ):
        opened(tmp_path)
    assert opened(tmp_path, vocab_size=513).description["tokens"] == 400


def test_tokens_are_not_looked_at_where_none_can_be_too_large(tmp_path, monkeypatch):
    write_bin(tmp_path / "a.bin", "<u2", 200)
    monkeypatch.setattr(shards.Shard, "read", lambda *_: pytest.fail("was read"))
    opened(tmp_path, vocab_size=2**16)
    with pytest.raises(pytest.fail.Exception):
        opened(tmp_path, vocab_size=2**16 - 1)


def test_of_several_processes_one_looks_for_all(tmp_path):
    write_bin(tmp_path / "a.bin", "<u2", 200)
    np.full(200, 600, "<u2").tofile(tmp_path / "b.bin")
    config = Config(
        model=LlamaConfig(vocab_size=512),
        data=DataConfig(source=str(tmp_path), sequence_length=8, batch_size=1),
    )
    config = config.replace(run={"eval_batches": 1})
    loader.open_batches(config, first=False)
    with pytest.raises(ConfigError, match=r"b\.bin: token 0"):
        loader.open_batches(config, first=True)


def test_tokens_that_change_after_opening_are_found_when_read(tmp_path):
    write_bin(tmp_path / "a.bin", "<u2", 200)
    batches = opened(tmp_path, batch=6)
    np.full(200, 600, "<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"is 600, and model\.vocab_size is 512"):
        batches.step(0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p.unlink(), r"cannot be read \(No such file"),
        (lambda p: p.write_bytes(bytes(100)), "was truncated after"),
    ],
)
def test_a_file_that_goes_after_opening_is_named(tmp_path, change, said):
    write_bin(tmp_path / "a.bin", "<u2", 200)
    batches = opened(tmp_path, vocab_size=2**16)  # with which no token is looked at
    change(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=rf"a\.bin {said}"):
        batches.step(0)


def test_a_shard_that_may_not_be_read_is_named_before_training(prepared, monkeypatch):
    real = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda self, *a, **k: denied() if self.suffix == ".bin" else real(self, *a, **k),
    )

    def denied():
        raise PermissionError(13, "Permission denied")

    with pytest.raises(ConfigError, match=r"train-00000\.bin cannot be read \(Permission denied\)"):
        opened(prepared)


def test_looking_at_tokens_shows_a_bar(tmp_path, monkeypatch):
    shown = []
    bar = console.bar
    monkeypatch.setattr(
        console, "bar", lambda title, total: (shown.append((title, total)), bar(title, total))[1]
    )
    monkeypatch.setattr(shards, "SCANNED", 64)
    write_bin(tmp_path / "a.bin", "<u2", 200)
    opened(tmp_path)
    assert shown == [("checking tokens", 4)]


def test_the_fingerprint_tells_other_names_sizes_and_contents(tmp_path, monkeypatch):  # D-4
    def told(content: np.ndarray, name: str = "a.bin") -> str:
        for old in tmp_path.iterdir():
            old.unlink()
        content.astype("<u2").tofile(tmp_path / name)
        return opened(tmp_path, fraction=0.5).description["sha256"]

    base = np.arange(100)
    changed = [base.copy() for _ in range(3)]
    for at, content in zip((0, 20, 99), changed, strict=True):
        content[at] = 7
    first, between, last = changed
    found = [told(content) for content in (base, *changed, base[:-1])] + [told(base, "b.bin")]
    assert len(set(found)) == 6
    assert told(base) == found[0]
    monkeypatch.setattr(shards, "WHOLE", 199)  # less than its 200 bytes, of which samples are read:
    monkeypatch.setattr(sidecar, "PIECE", 4)  # four bytes of every 28
    assert len({told(content) for content in (base, first, last)}) == 3
    assert told(between) == told(base)


@pytest.mark.parametrize("size", [0, 1, 2**13, 2**13 + 1, 2**16 - 1, 2**16])
def test_a_sample_is_all_of_a_small_file(tmp_path, size):  # D-4
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(size))
    samples = {sidecar.sample(path)}
    for at in range(0, size, 509):
        path.write_bytes(bytes(at) + b"x" + bytes(size - at - 1))
        samples.add(sidecar.sample(path))
    assert len(samples) == 1 + len(range(0, size, 509))


def test_where_shards_lie_changes_neither_fingerprint_nor_order(tmp_path):
    for place in ("one", "two/deep"):
        (tmp_path / place).mkdir(parents=True)
        write_bin(tmp_path / place / "a.bin", "<u2", 500)
        write_bin(tmp_path / place / "b.bin", "<u2", 300)
    one, two, pattern = (
        opened(tmp_path / "one"),
        opened(tmp_path / "two/deep"),
        opened(tmp_path / "two/*/*.bin"),
    )
    assert one.description["sha256"] == two.description["sha256"] == pattern.description["sha256"]
    assert one.step(3).tobytes() == two.step(3).tobytes() == pattern.step(3).tobytes()
    assert json.loads(json.dumps(one.description)) == one.description
    assert one.description["files"][1] == {"name": "b.bin", "bytes": 600, "tokens": 300}


def test_opening_maps_no_file_and_few_stay_mapped(tmp_path, monkeypatch):
    mapped = []
    real = shards._map

    def remembered(shard):
        made = real(shard)
        mapped.append(weakref.ref(made))
        return made

    monkeypatch.setattr(shards, "_map", remembered)
    monkeypatch.setattr(shards, "OPEN", 4)
    for i in range(30):
        with (tmp_path / f"{i:02}.bin").open("wb") as file:
            file.truncate(2**30)  # a hole, which takes no disk
    batches = opened(tmp_path, vocab_size=2**16)
    assert mapped == []
    assert batches.description["tokens"] == 30 * 2**29
    for step in range(12):
        batches.step(step)
    assert 4 < len(mapped) <= 12
    assert len([map for map in mapped if map() is not None]) == 4


@pytest.fixture
def prepared(tmp_path):
    """Shards and their sidecar, as a dict that write() puts back."""
    path = tmp_path / "train-00000.bin"
    write_bin(path, "<u4", 200)
    made = sidecar.Sidecar(
        format="fp8ref shards 2",
        source="stdlib",
        tokenizer="bytes",
        vocab_size=500,
        end_of_document=None,
        dtype="uint32",
        max_id=499,
        files={
            path.name: sidecar.File(
                tokens=200,
                sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
                sample=sidecar.sample(path),
            )
        },
    )
    sidecar.write(tmp_path, made)
    return tmp_path


def change(folder, **keys):
    path = folder / "shards.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


# D-7
def test_a_sidecar_states_type_and_largest_token_so_that_nothing_is_read(prepared, monkeypatch):
    monkeypatch.setattr(shards.Shard, "read", lambda *_: pytest.fail("was read"))
    assert opened(prepared).description["tokens"] == 200
    assert opened(prepared / "train-00000.bin").description["tokens"] == 200


@pytest.mark.parametrize(
    ("whole", "said"),
    [(800, "its SHA-256 is [0-9a-f]{64}"), (799, "its SHA-256 of samples is [0-9a-f]{64}")],
)
# D-4
def test_a_shard_that_changed_after_its_sidecar_was_written_is_refused(
    prepared, monkeypatch, whole, said
):
    monkeypatch.setattr(shards, "WHOLE", whole)
    before = opened(prepared).description["sha256"]
    path = prepared / "train-00000.bin"
    content = path.read_bytes()
    path.write_bytes(content[:400] + b"\0" + content[401:])
    with pytest.raises(
        ConfigError,
        match=rf"train-00000\.bin was changed after it was written: {said}, not that in "
        r".*shards\.json. Put the",
    ):
        opened(prepared)
    path.write_bytes(content)
    assert opened(prepared).description["sha256"] == before


def test_the_hash_in_a_sidecar_is_that_of_the_fingerprint(prepared, monkeypatch):
    """Of a large source too, of which a sample alone is compared."""
    monkeypatch.setattr(shards, "WHOLE", 799)
    before = opened(prepared).description["sha256"]
    change(
        prepared,
        files={
            "train-00000.bin": {
                "tokens": 200,
                "sha256": "1" * 64,
                "sample": sidecar.sample(prepared / "train-00000.bin"),
            }
        },
    )
    assert opened(prepared).description["sha256"] != before


def test_an_old_sidecar_is_named_as_such(prepared):
    change(
        prepared, format="fp8ref shards 1", files={"train-00000.bin": {"tokens": 200, "sha256": ""}}
    )
    with pytest.raises(
        ConfigError,
        match=r"format: Input should be 'fp8ref shards 2'; got 'fp8ref shards 1'\). Write the "
        r"shards again",
    ):
        opened(prepared)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"vocab_size": 513},
            r"model.vocab_size is 512, and the vocabulary of .*shards\.json 513. Set "
            r"model.vocab_size to 513",
        ),
        ({"max_id": 512}, "the vocabulary of .* 513"),
        ({"format": "other"}, "format: Input should be 'fp8ref shards 2'; got 'other'"),
        ({"dtype": "int64"}, "dtype: Input should be 'uint16' or 'uint32'; got 'int64'"),
        ({"more": 1}, r"shards\.json is not a sidecar"),
        ({"files": {}, "tokenizer": 3}, r"tokenizer: Input should be a valid string"),
        (
            {"files": {"train-00000.bin": {"tokens": 199, "sha256": "", "sample": ""}}},
            r"train-00000\.bin holds 200 tokens, and .*shards\.json says 199",
        ),
        (
            {"files": {"absent.bin": {"tokens": 1, "sha256": "", "sample": ""}}},
            r"lists absent\.bin, which is not there",
        ),
    ],
)
def test_a_sidecar_that_does_not_fit_is_refused(prepared, keys, said):
    change(prepared, **keys)
    with pytest.raises(ConfigError, match=said):
        opened(prepared)


def test_a_torn_sidecar_is_refused(prepared):
    path = prepared / "shards.json"
    path.write_text(path.read_text()[:40])
    with pytest.raises(
        ConfigError, match=r"shards\.json is not a sidecar of this fp8ref's data prepare"
    ):
        opened(prepared)


def test_a_type_other_than_the_sidecar_s_is_refused(prepared):
    with pytest.raises(
        ConfigError, match=r"data.token_dtype is uint16, and .*train-00000\.bin holds uint32"
    ):
        opened(prepared, token_dtype="uint16")


def test_a_file_that_the_sidecar_does_not_list_is_looked_at(prepared):
    write_bin(prepared / "more.bin", "<u2", 100)
    assert opened(prepared).description["tokens"] == 300
    np.full(100, 512, "<u2").tofile(prepared / "more.bin")
    with pytest.raises(ConfigError, match=r"more\.bin: token 0"):
        opened(prepared)


def test_an_npy_whose_header_states_its_own_length_takes_no_such_memory(tmp_path):
    """NumPy's reader allocates the 600 MB that this header claims, before it finds the file's
    end.
    """
    header = (600 * 2**20).to_bytes(4, "little") + b"{'descr': '<u2', "
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x02\x00" + header + bytes(200))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"a\.npy is not a complete .npy file"):
            opened(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
