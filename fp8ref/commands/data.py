"""fp8ref data prepare: tokenize text into token shards."""

import argparse
from pathlib import Path

from fp8ref.commands import shared
from fp8ref.commands.shared import INTERRUPTED
from fp8ref.shared import console


def add(commands) -> None:
    """Add ``fp8ref data prepare``."""
    data = commands.add_parser(
        "data", help="Prepare training data.", description="Prepare training data."
    )
    subcommands = data.add_subparsers(required=True, metavar="COMMAND")
    # the defaults are those of the config's keys (DataConfig), which are not imported for --help
    # alone: an option that is left out is no attribute
    prepare = shared.plain(subcommands, "prepare", _prepare, "Tokenize text into token shards.")
    prepare.add_argument(
        "--source",
        required=True,
        help="stdlib, a directory of text, .jsonl or .parquet (file, directory, pattern), or "
        "hf:org/name[:config]",
    )
    prepare.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="output directory; new or empty"
    )
    prepare.add_argument(
        "--tokenizer",
        default=argparse.SUPPRESS,
        help="a tokenizer.json, or tiktoken:NAME (default: bytes)",
    )
    prepare.add_argument(
        "--end-of-document",
        default=argparse.SUPPRESS,
        metavar="TOKEN",
        help="the token after each document; '' for none (default: the tokenizer's)",
    )
    prepare.add_argument(
        "--text-column",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="the column that holds the text (default text)",
    )
    prepare.add_argument(
        "--hf-split",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="the split of a hub dataset (default train)",
    )
    prepare.add_argument(
        "--validation-fraction",
        default=argparse.SUPPRESS,
        type=float,
        metavar="F",
        help="share for validation (default 0.1); unused if files are named val",
    )
    prepare.add_argument(
        "--shard-tokens",
        default=argparse.SUPPRESS,
        type=int,
        metavar="N",
        help="largest number of tokens in a file (default 10^8)",
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
        f"train from them with --data.source {arguments.out} "
        f"--model.vocab_size {sidecar.vocab_size}",
    )
    return 0


def _named(arguments: argparse.Namespace, *names: str) -> dict:
    """Those of these options that the command line names."""
    return {name: value for name, value in vars(arguments).items() if name in names}
