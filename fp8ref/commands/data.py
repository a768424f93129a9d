"""fp8ref data prepare: tokenize text into token shards."""

import argparse

from fp8ref.commands import shared
from fp8ref.commands.shared import INTERRUPTED
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref data prepare``."""
    subcommands = shared.group(commands, "data", "Prepare training data.", "prepare")
    # the defaults are those of the config's keys (DataConfig), which are not imported for --help
    # alone: an option that is left out is no attribute
    left_out = argparse.SUPPRESS
    prepare = shared.plain(
        subcommands,
        "prepare",
        _prepare,
        "Tokenize text into token shards.",
        usage="--source SOURCE --out DIR",
        examples=(
            "data prepare --source stdlib --out data/tokens",
            "data prepare --source text --out data/tokens --tokenizer tokenizer.json",
            "data prepare --source hf:org/name --out gpt2 --tokenizer tiktoken:gpt2",
        ),
    )
    prepare.option(
        "--source",
        "SOURCE",
        "stdlib, a directory of text, .jsonl or .parquet (file, directory, pattern), or "
        "hf:org/name[:config]",
        required=True,
    )
    prepare.option("--out", "DIR", "output directory; new or empty", required=True)
    prepare.option(
        "--tokenizer", "NAME", "a tokenizer.json, or tiktoken:NAME (default: bytes)", left_out
    )
    prepare.option(
        "--end-of-document",
        "TOKEN",
        "the token after each document; '' for none (default: the tokenizer's)",
        left_out,
    )
    prepare.option(
        "--text-column", "NAME", "the column that holds the text (default text)", left_out
    )
    prepare.option("--hf-split", "NAME", "the split of a hub dataset (default train)", left_out)
    prepare.option(
        "--validation-fraction",
        "X",
        "share for validation (default 0.1); unused if files are named val",
        left_out,
    )
    prepare.option(
        "--shard-tokens", "N", "largest number of tokens in a file (default 10^8)", left_out
    )


def _prepare(arguments: argparse.Namespace) -> int:
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
