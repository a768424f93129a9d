"""Small tokenizers that need no network."""

import tiktoken.registry
import tokenizers

WORDS = ("fp8", "amax", "scale", "bits", "?")
TIKTOKEN = r"""
def tiny():
    ranks = {bytes([i]): i for i in range(256)} | {b"fp": 256}
    return {"name": "tiny", "pat_str": r"\w+|\W", "mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 300}}

def endless():
    return {**tiny(), "name": "endless", "special_tokens": {}}

ENCODING_CONSTRUCTORS = {"tiny": tiny, "endless": endless}
"""


def write_words(path):
    """A tokenizer.json that knows WORDS and, as id 5, an end token; it adds that in a template of
    its own, and by itself cuts at four tokens and pads.
    """
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<|end|>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", 5)]
    )
    made.enable_truncation(4)
    made.enable_padding()
    made.save(str(path))
    return path


def install_tiktoken(folder, monkeypatch):
    """The encodings tiny and endless, as a plugin of tiktoken's on the path, which it looks for
    once: yields while it is there.
    """
    (folder / "tiktoken_ext").mkdir()
    (folder / "tiktoken_ext" / "tiny_encodings.py").write_text(TIKTOKEN)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr(tiktoken.registry, "ENCODINGS", {})
        patch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", None)
        tiktoken.registry._available_plugin_modules.cache_clear()
        yield
    tiktoken.registry._available_plugin_modules.cache_clear()
