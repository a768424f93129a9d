import hashlib
import json
import os
import sys
import threading

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from helpers.models.tokenizing import write_words

from fp8ref.shared.errors import ConfigError
from fp8ref.spec.llama import LlamaConfig
from fp8ref.train.config.config import Config
from fp8ref.train.config.sections import DataConfig, RunConfig
from fp8ref.train.data import documents, loader, sources

TEXTS = [f"{'amax ' * (i % 7)}{i} é" for i in range(60)]


def write(path, texts, column="text"):
    rows = [{"id": i, column: text} for i, text in enumerate(texts)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)


def read(source, *, utf8=True, **keys) -> list[documents.Document]:
    config = DataConfig(source=str(source), validation_fraction=0.25, **keys)
    return list(documents.read(config, sources.find(config), utf8=utf8))


def opened(source, **keys) -> loader.Batches:
    section = DataConfig(
        source=str(source), sequence_length=8, batch_size=1, validation_fraction=0.25, **keys
    )
    return loader.open_batches(
        Config(model=LlamaConfig(), data=section, run=RunConfig(eval_batches=1))
    )


def in_validation(text: str) -> bool:
    """D-6, by its words."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16) < 2**64 // 4


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_documents_are_read_in_order_and_split_by_their_text(tmp_path, suffix):  # D-6
    write(tmp_path / f"a{suffix}", TEXTS[:31])
    write(tmp_path / f"b{suffix}", TEXTS[31:])
    found = read(tmp_path)
    assert [d.text.decode() for d in found] == TEXTS
    assert [d.validation for d in found] == [in_validation(text) for text in TEXTS]
    assert 5 < sum(d.validation for d in found) < 25
    total = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert [d.read for d in found] == sorted(d.read for d in found)
    assert total - 1 <= found[-1].read <= total


def test_files_named_val_are_validation(tmp_path):  # D-5
    write(tmp_path / "train.jsonl", TEXTS[:20])
    write(tmp_path / "validation.parquet", TEXTS[20:])
    assert [d.validation for d in read(tmp_path)] == [False] * 20 + [True] * 40


def test_empty_documents_and_blank_lines_are_left_out(tmp_path):  # D-6
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n{"text": "x"}\n  \n{"text": "y"}')
    assert [d.text for d in read(tmp_path)] == [b"x", b"y"]


def test_a_pipe_is_read_too(tmp_path):
    """Whose size is 0."""
    os.mkfifo(tmp_path / "a.jsonl")
    writer = threading.Thread(target=lambda: write(tmp_path / "a.jsonl", TEXTS))
    writer.start()
    assert [d.text.decode() for d in read(tmp_path)] == TEXTS
    writer.join()


def test_damage_to_parquet_is_an_error_of_one_line(tmp_path):
    """Arrow's own has several."""
    path = tmp_path / "a.parquet"
    write(path, TEXTS[:3])
    content = path.read_bytes()
    messages = []
    for at in range(0, len(content), 16):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        try:
            read(tmp_path)
        except ConfigError as error:
            messages.append(str(error))
    assert messages
    assert all("\n" not in said and str(path) in said for said in messages)


def test_a_pipe_of_parquet_is_refused(tmp_path):
    """It is read from its end."""
    os.mkfifo(tmp_path / "a.parquet")  # which nobody writes to
    with pytest.raises(
        ConfigError, match=r"a\.parquet cannot be read \(it is no regular file, but a pipe"
    ):
        read(tmp_path)


def test_another_column(tmp_path):
    write(tmp_path / "a.parquet", ["x"], column="content")
    assert [d.text for d in read(tmp_path, text_column="content")] == [b"x"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": "x"}\nno\n', r"a\.jsonl: line 2 is not JSON \("),
        ("a.jsonl", b"[1]\n", r"a\.jsonl: line 1 is not a JSON object"),
        (
            "a.jsonl",
            b'{"body": "x", "id": 1}\n',
            r"line 1 has no column 'text'; it has 'body', 'id'. Set data.text_column",
        ),
        ("a.jsonl", b"{}\n", r"line 1 has no column 'text'; it has none. Set"),
        (
            "val.jsonl",
            b'{"text": "x"}\n',
            r"every file is for validation by its name, such as 'val\.jsonl' \(D-5\)",
        ),
        ("a.jsonl", b'{"text": null}\n', r"line 1: 'text' is not text but NoneType"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"line 1: 'text' is not Unicode text"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl: line 1 is not JSON \("),
        ("a.parquet", b"", r"a\.parquet cannot be read"),
        ("a.parquet", b"PAR1 and no more", r"a\.parquet cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_file_that_is_not_there_is_named(tmp_path, suffix):
    (tmp_path / f"a{suffix}").symlink_to("absent")
    with pytest.raises(ConfigError, match=rf"a{suffix} cannot be read"):
        opened(tmp_path)


def test_bytes_of_text_files_may_have_an_end(tmp_path):  # D-6
    for i in range(60):
        (tmp_path / f"{i:02}.txt").write_text("x" * 7)
    assert (
        opened(tmp_path, end_of_document="|").step(0).astype(np.uint8).tobytes() in b"xxxxxxx|" * 3
    )


def test_a_parquet_without_the_column_or_of_another_type_is_named(tmp_path):
    write(tmp_path / "a.parquet", ["x"], column="body")
    with pytest.raises(ConfigError, match=r"a\.parquet has no column 'text'; it has 'id', 'body'"):
        read(tmp_path)
    with pytest.raises(ConfigError, match=r"a\.parquet: row 1: 'id' is not text but int"):
        read(tmp_path, text_column="id")


def test_a_parquet_whose_text_is_not_utf8_is_named(tmp_path):
    broken = pyarrow.StringArray.from_buffers(
        1, pyarrow.py_buffer(np.array([0, 1], "<i4")), pyarrow.py_buffer(b"\xff")
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    with pytest.raises(
        ConfigError, match=r"a\.parquet cannot be read \('utf-8' codec can't decode byte 0xff"
    ):
        read(tmp_path)


def test_a_byte_order_mark_and_line_ends_of_dos_are_no_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\r\n\r\n{"text": "y"}\r\n')
    assert [d.text for d in read(tmp_path)] == [b"x", b"y"]


def test_text_files_need_to_be_utf8_for_a_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"a\.txt is not UTF-8"):
        read(tmp_path)
    assert [d.text for d in read(tmp_path, utf8=False)] == [b"\xff"]


@pytest.fixture
def words(tmp_path_factory):
    return str(write_words(tmp_path_factory.mktemp("words") / "tokenizer.json"))


def test_training_reads_tokenized_documents_that_follow_each_other(tmp_path, words):  # D-6
    write(tmp_path / "train.jsonl", ["fp8 amax", "bits"] * 20)
    write(tmp_path / "val.jsonl", ["scale"] * 20)
    batches = opened(tmp_path, tokenizer=words, end_of_document="<|end|>")
    stream = np.array([0, 1, 5, 3, 5] * 20)
    assert sorted(batches.step(i)[0].tolist() for i in range(12)) == sorted(
        stream[i : i + 9].tolist() for i in range(0, 92, 8)
    )
    assert batches.held_out(0)[0].tolist() == [2, 5] * 4 + [2]
    described = batches.description
    assert (described["train_tokens"], described["validation_tokens"], described["files"]) == (
        100,
        40,
        2,
    )
    assert described["validation_unigram_entropy"] == pytest.approx(np.log(2))
    assert json.loads(json.dumps(described)) == described


def test_the_hash_is_of_the_tokens(tmp_path):
    write(tmp_path / "train.jsonl", TEXTS)
    write(tmp_path / "val.jsonl", TEXTS)
    before = opened(tmp_path).description["sha256"]
    write(tmp_path / "other.jsonl", TEXTS[30:])
    (tmp_path / "train.jsonl").unlink()
    assert opened(tmp_path).description["sha256"] != before
    write(tmp_path / "train.jsonl", TEXTS)
    (tmp_path / "other.jsonl").unlink()
    assert opened(tmp_path).description["sha256"] == before


def test_text_files_with_a_tokenizer_are_documents_split_by_path(tmp_path, words):  # D-6
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text("fp8 amax bits scale" * (i + 1))
    found = read(tmp_path, tokenizer=words)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [d.validation for d in found] == [
        hashlib.sha256(name.encode()).digest()[0] < 64 for name in names
    ]
    assert opened(tmp_path, tokenizer=words, end_of_document="").description["tokenizer"] == words


def test_a_vocabulary_larger_than_the_model_s_is_refused_before_anything_is_read(
    tmp_path, words, monkeypatch
):
    content = json.loads((tmp_path.parent / words).read_text())
    content["model"]["vocab"]["rare"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    write(tmp_path / "a.jsonl", TEXTS)
    monkeypatch.setattr(documents, "tokenized", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(
        ConfigError, match=r"model.vocab_size is 256, and the vocabulary of tokenizer .* 301"
    ):
        opened(tmp_path / "a.jsonl", tokenizer=str(tmp_path / "tokenizer.json"), end_of_document="")


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_many_gigabytes_are_refused_with_the_way(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text('{"text": "x"}\n' * 1000)
    monkeypatch.setattr(documents, "IN_MEMORY", 100)
    with pytest.raises(ConfigError, match="fp8ref data prepare"):
        opened(tmp_path)


def test_a_dataset_of_the_hub_is_refused_with_the_command_that_makes_shards_of_it():
    with pytest.raises(ConfigError, match=r"fp8ref data prepare --source hf:org/name --out tokens"):
        opened("hf:org/name")


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", ["x"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        ConfigError, match=r"reading a.parquet needs pyarrow .*pip install 'fp8ref\[data\]'"
    ):
        read(tmp_path)
