import json
import os
import sys

import numpy as np
import pytest
from helpers.models.tokenizing import install_tiktoken, write_words

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config.sections import DataConfig
from fp8ref.train.data import tokenizers


def load(name=None, end=None, kind="documents") -> tokenizers.Tokenizer:
    return tokenizers.load(
        DataConfig(tokenizer=None if name is None else str(name), end_of_document=end), kind
    )


@pytest.fixture
def words(tmp_path):
    return write_words(tmp_path / "tokenizer.json")


@pytest.fixture
def tiktoken_tiny(tmp_path, monkeypatch):
    yield from install_tiktoken(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("end", "kind", "expected"),
    [
        (None, "documents", [104, 255, 0]),
        (None, "text", [104, 255]),
        ("", "documents", [104, 255]),
        ("\n", "text", [104, 255, 10]),
    ],
)
def test_bytes(end, kind, expected):  # D-6
    made = load(end=end, kind=kind)
    (tokens,) = made.encode([b"h\xff"])
    assert tokens.tolist() == expected
    assert (made.name, made.vocab_size, made.dtype) == ("bytes", 256, np.uint16)


@pytest.mark.parametrize("end", ["<|end|>", "é", "\udcff"])
def test_the_end_of_bytes_is_one_byte(end):
    with pytest.raises(ConfigError) as refused:
        load(end=end)
    assert (
        f"data.end_of_document is one byte where tokens are bytes, or '' for none; got {end!r}."
        in str(refused.value)
    )


def test_hugging_face(words):  # D-6
    """Nothing is added, cut or padded, and a special token that a text spells is text."""
    made = load(words, end="<|end|>")
    text = b"fp8 amax bits scale scale <|end|> fp8"
    assert [t.tolist() for t in made.encode([text, b"amax"])] == [[0, 1, 3, 2, 2, 4, 0, 5], [1, 5]]
    assert (made.vocab_size, made.dtype) == (6, np.uint16)
    assert [t.tolist() for t in load(words, end="").encode([b"amax"])] == [[1]]


@pytest.mark.parametrize("eos", ["<|end|>", {"content": "<|end|>"}], ids=["str", "object"])
@pytest.mark.parametrize("folder", [False, True])
def test_hugging_face_names_its_end_in_the_config_beside_it(words, eos, folder):  # D-6
    (words.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert load(words.parent if folder else words).end == 5
    assert load(words, end="fp8").end == 0


@pytest.mark.parametrize(
    ("beside", "end", "said"),
    [
        (None, None, r"names no token that ends a document. Set data.end_of_document"),
        ({}, None, r"names no token that ends a document"),
        ({"eos_token": "</s>"}, None, r"has no token '</s>'"),
        (None, "</s>", r"has no token '</s>'"),
        ({"eos_token": ["</s>"]}, None, r"names no token that ends a document"),
        ([], None, r"tokenizer_config.json cannot be read"),
    ],
)
def test_an_end_that_is_not_there_is_refused(words, beside, end, said):
    if beside is not None:
        (words.parent / "tokenizer_config.json").write_text(json.dumps(beside))
    with pytest.raises(ConfigError, match=said):
        load(words, end=end)


def test_the_vocabulary_counts_to_the_largest_id(tmp_path):
    content = json.loads(write_words(tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["rare"] = 70000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    made = load(tmp_path / "tokenizer.json", end="")
    assert (made.vocab_size, made.dtype) == (70001, np.uint32)
    assert made.encode([b"rare"])[0].tolist() == [70000]


def test_a_text_that_a_tokenizer_has_no_tokens_for_is_a_user_s_error(tmp_path):
    content = json.loads(write_words(tmp_path / "tokenizer.json").read_text())
    del content["model"]["vocab"]["?"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"tokenizer.json' has no tokens for a document \(.*\). Give it a token"
    ):
        load(tmp_path / "tokenizer.json", end="").encode([b"fp8 unheard"])


@pytest.mark.parametrize("name", ["absent.json", "broken.json", "pipe.json"])
def test_what_is_no_tokenizer_is_refused(tmp_path, name):
    (tmp_path / "broken.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe.json")  # which nobody writes to
    with pytest.raises(ConfigError, match=rf"{name}' cannot be read as a tokenizer.json"):
        load(tmp_path / name)


def test_tiktoken(tiktoken_tiny):  # D-6
    made = load("tiktoken:tiny")
    assert [t.tolist() for t in made.encode([b"fp8", "é".encode()])] == [
        [256, ord("8"), 300],
        [0xC3, 0xA9, 300],
    ]
    assert made.encode([b"<|endoftext|>"])[0].tolist() == [*b"<|endoftext|>", 300]
    assert (made.name, made.vocab_size) == ("tiktoken:tiny", 301)


def test_tiktoken_without_an_end_asks_for_it(tiktoken_tiny):
    with pytest.raises(
        ConfigError,
        match=r"'tiktoken:endless' has no token '<\|endoftext\|>'. Set data.end_of_document",
    ):
        load("tiktoken:endless")
    assert load("tiktoken:endless", end="").end is None


def test_an_unknown_encoding_names_those_there_are(tiktoken_tiny):
    with pytest.raises(
        ConfigError, match=r"tiktoken cannot give it .* It knows .*endless.*TIKTOKEN_CACHE_DIR"
    ):
        load("tiktoken:absent")


@pytest.mark.parametrize(
    ("name", "library"), [("tiktoken:tiny", "tiktoken"), ("t.json", "tokenizers")]
)
def test_a_missing_library_names_its_extra(monkeypatch, name, library):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"{library}.*pip install 'fp8ref\[data\]'"):
        load(name)
