"""fp8ref data prepare: tokenize text into token shards."""

import argparse

from fp8ref.commands import shared
from fp8ref.commands.shared import INTERRUPTED
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref data prepare``."""
    subcommands = shared.group(commands, "data prepare", "Prepare training data.")
    # the defaults are those of the config's keys (DataConfig), which are not imported for --help
    # alone: an option that is left out is no attribute
    prepare = shared.plain(subcommands, "prepare --source SOURCE --out DIR", _prepare)
    option, absent = prepare.option, argparse.SUPPRESS
    text = "stdlib, text, .jsonl, .parquet (file, directory, pattern) or hf:org/name"
    option("--source", "SOURCE", text, required=True)
    option("--out", "DIR", "output directory; new or empty", required=True)
    option("--tokenizer", "NAME", "tokenizer.json or tiktoken:NAME (default: bytes)", absent)
    text = "the token after each document; '' for none (default: the tokenizer's)"
    option("--end-of-document", "TOKEN", text, absent)
    option("--text-column", "NAME", "the column of the text (default text)", absent)
    option("--hf-split", "NAME", "the split of a hub dataset (default train)", absent)
    text = "share for validation (default 0.1), unless files are named val"
    option("--validation-fraction", "X", text, absent)
    option("--shard-tokens", "N", "most tokens of a file (default 10^8)", absent)


def _prepare(arguments: argparse.Namespace) -> int:
    """Tokenize text into token shards.

    $ fp8ref data prepare --source stdlib --out data/tokens
    $ fp8ref data prepare --source text --out data/tokens --tokenizer tokenizer.json
    $ fp8ref data prepare --source hf:org/name --out gpt2 --tokenizer tiktoken:gpt2
    """
    from fp8ref.train.config.sections import DataConfig
    from fp8ref.train.data.prepare import prepare
    from fp8ref.train.run import signals

    keys = ("source", "tokenizer", "end_of_document", "text_column", "validation_fraction")
    data = DataConfig(**_named(arguments, *keys))
    try:
        with signals.exiting_on_sigterm():
            sidecar = prepare(data, arguments.out, **_named(arguments, "shard_tokens", "hf_split"))
    except KeyboardInterrupt:
        console.say(f"interrupted; {arguments.out} was not written")
        return INTERRUPTED
    except SystemExit:
        console.say(f"stopped by SIGTERM; {arguments.out} was not written")
        return signals.TERMINATED
    tokens = {
        split: sum(f.tokens for name, f in sidecar.files.items() if name.startswith(split))
        for split in ("train", "val")
    }
    console.show(
        f"{arguments.out}: {tokens['train']:,} tokens for training, {tokens['val']:,} for "
        f"validation, {sidecar.dtype}, in {len(sidecar.files)} files",
        f"next: fp8ref train CONFIG --data.source {arguments.out} "
        f"--model.vocab_size {sidecar.vocab_size}",
    )
    return 0


def _named(arguments: argparse.Namespace, *names: str) -> dict:
    """Those of these options that the command line names."""
    return {name: value for name, value in vars(arguments).items() if name in names}
