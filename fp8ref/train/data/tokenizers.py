"""Tokenizers: bytes, Hugging Face's tokenizer.json, or a tiktoken encoding (spec D-6).

The libraries are imported only when used. Only the end-of-document token is added, and the text of
a special token in a document is tokenized as plain text.
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError, require
from fp8ref.train.config.sections import DataConfig

TIKTOKEN = "tiktoken:"  # the prefix of a data.tokenizer that is an encoding of tiktoken


def library(name: str, why: str) -> Any:
    """Import a module of the extra [data]. why: begins the message if it is missing.

    Raises:   ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise ConfigError(
            f"{why} needs {package} ({error}). Install it with pip install 'fp8ref[data]'."
        ) from error


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """Turns texts into tokens.

    name        ``bytes``, or the value of data.tokenizer.
    vocab_size  the number of tokens; every token is below it.
    end         the token after each document, or None.
    ids         texts, UTF-8 -> the tokens of each, without the end.
    """

    name: str
    vocab_size: int
    end: int | None
    ids: Callable[[Sequence[bytes]], Iterable[Sequence[int] | np.ndarray]]

    @property
    def dtype(self) -> np.dtype:
        """Little-endian uint16 or uint32, as vocab_size needs."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The tokens of each text, UTF-8, the end included.

        Raises:   ConfigError: a document that the library of data.tokenizer cannot encode.
        """
        end = np.array([] if self.end is None else [self.end], self.dtype)
        return [np.concatenate([np.asarray(ids, self.dtype), end]) for ids in self.ids(texts)]


def load(data: DataConfig, kind: str) -> Tokenizer:
    """The tokenizer of data.tokenizer, for a source of this kind.

    Raises:   ConfigError: its library or file is missing; it lacks the end-of-document token.
    """
    if data.tokenizer is None:
        return _bytes(data.end_of_document, kind)
    if data.tokenizer.startswith(TIKTOKEN):
        return _tiktoken(data.tokenizer, data.end_of_document)
    return _hugging_face(data.tokenizer, data.end_of_document)


def _bytes(end: str | None, kind: str) -> Tokenizer:
    """Each byte is a token."""
    last = None if kind == "text" else 0
    if end is not None:
        text = "data.end_of_document is one byte where tokens are bytes, or '' for none; got"
        require(len(end.encode(errors="surrogatepass")) <= 1, f"{text} {end!r}.", ConfigError)
        last = end.encode()[0] if end else None
    ids = functools.partial(map, functools.partial(np.frombuffer, dtype=np.uint8))
    return Tokenizer(name="bytes", vocab_size=256, end=last, ids=ids)


def _tiktoken(name: str, end: str | None) -> Tokenizer:
    """A ``tiktoken.Encoding``; special tokens in a text count as plain text."""
    tiktoken = library("tiktoken", f"data.tokenizer {name!r}")
    try:
        encoding = tiktoken.get_encoding(name.removeprefix(TIKTOKEN))
    except Exception as error:  # an unknown name, or any error of a download
        names = ", ".join(tiktoken.list_encoding_names())
        why = str(error).partition("\n")[0]
        raise ConfigError(
            f"data.tokenizer {name!r}: tiktoken cannot give it ({type(error).__name__}: "
            f"{why}). It knows {names}, and downloads each once. Without a network, set "
            "TIKTOKEN_CACHE_DIR to a directory with the download."
        ) from error
    names = encoding.special_tokens_set
    special = {token: encoding.encode_single_token(token) for token in names}
    return Tokenizer(
        name=name,
        vocab_size=encoding.n_vocab,
        end=_end(special, end, "<|endoftext|>", name),
        ids=lambda texts: encoding.encode_ordinary_batch([text.decode() for text in texts]),
    )


def _hugging_face(name: str, end: str | None) -> Tokenizer:
    """A ``tokenizers.Tokenizer`` of Hugging Face."""
    made_by = library("tokenizers", f"data.tokenizer {name!r}")
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        tokenizer = made_by.Tokenizer.from_buffer(files.read_bytes(path))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(
            f"data.tokenizer {name!r} cannot be read as a tokenizer.json ({error}). Name such a "
            "file, a directory that holds one, or tiktoken:NAME."
        ) from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    own = _eos_token(path.with_name("tokenizer_config.json"))

    def ids(texts: Sequence[bytes]) -> list[list[int]]:
        try:
            encodings = tokenizer.encode_batch(
                [text.decode() for text in texts], add_special_tokens=False
            )
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(
                f"data.tokenizer {name!r} has no tokens for a document ({error}). Give it a token "
                "for unknown text."
            ) from error
        return [encoding.ids for encoding in encodings]

    return Tokenizer(
        name=name,
        vocab_size=max(vocabulary.values(), default=-1) + 1,
        end=_end(vocabulary, end, own, name),
        ids=ids,
    )


def _eos_token(path: Path) -> str | None:
    """eos_token of a tokenizer_config.json, a string or an object with ``content``."""
    try:
        token = files.read_object(path).get("eos_token")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Repair or remove it.") from error
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _end(ids: dict[str, int], chosen: str | None, own: str | None, name: str) -> int | None:
    token = own if chosen is None else chosen
    if token == "":
        return None
    if token not in ids:
        problem = "names no token that ends a document"
        if token is not None:
            problem = f"has no token {token!r}"
        raise ConfigError(
            f"data.tokenizer {name!r} {problem}. Set data.end_of_document to one of its tokens, or "
            "to '' for none."
        )
    return ids[token]
