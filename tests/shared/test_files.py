"""Every reader of files from outside, over damaged and hostile ones: only errors of the project
come out, and memory is bounded.

A file is damaged by flipped bits, cut and lengthened; JSON and TOML also by values of other types,
lost keys and depth. The seed of each damage is its number.
"""

import copy
import json
import os
import random
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from helpers.training import made_runs
from helpers.training.fakes import FakeTrainer
from safetensors.numpy import save_file

from fp8ref.checkpoints.tensors import INDEX
from fp8ref.conformance.gemm import recording as gemm_recording
from fp8ref.conformance.vectors import format as vectors
from fp8ref.estimate import gpu_rates
from fp8ref.shared import files
from fp8ref.shared.errors import ConfigError
from fp8ref.spec.llama import LlamaConfig
from fp8ref.study import own_tensors, recording
from fp8ref.train import tensors
from fp8ref.train.config import config as configs
from fp8ref.train.config import hardware, user_model
from fp8ref.train.config.sections import ArchitectureConfig, DataConfig
from fp8ref.train.data import documents, shards, sidecar, tokenizers
from fp8ref.train.experiments import ablation_start, variants
from fp8ref.train.models import export
from fp8ref.train.models.hugging_face import described
from fp8ref.train.report import foreign_logs, runs
from fp8ref.train.run import checkpoint, failed_step, log
from fp8ref.train.run.processes import Alone

BYTES = 2**25
"""More than any reader needs for files of a few thousand bytes, and less than any claim of a
hostile one.
"""

CALLS = 300_000
"""More calls than any reader makes for such a file; a parser that is quadratic in it makes
millions.
"""

VALUES = (
    None,
    True,
    -1,
    0,
    1.5,
    2**70,
    float("inf"),
    float("nan"),
    "",
    "x",
    [],
    [[]],
    {},
    {"x": 1},
    ["x", 1],
    {"x": {"x": []}},
)


def flipped(content: bytes, rng: random.Random) -> bytes:
    """One to four bits flipped, bytes cut off or out, put in or repeated."""
    if not content:
        return b"\0"
    at, kind = rng.randrange(len(content)), rng.randrange(6)
    if kind < 3:
        made = bytearray(content)
        for _ in range(rng.choice((1, 1, 4))):
            made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
        return bytes(made)
    if kind == 3:
        return content[:at]
    if kind == 4:
        return content[:at] + content[at + rng.randrange(1, 9) :]
    return (
        content[:at]
        + rng.choice(
            (b"\xff", b"[" * 5000, b'{"a":' * 5000, b"9" * 400, b"\0" * 8, content[at : at + 50])
        )
        + content[at:]
    )


def places(value, path=()):
    """The path of every value within."""
    inner = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(place for key, one in inner for place in places(one, (*path, key)))]


def retyped(value, rng: random.Random):
    """One value replaced by one of another type, or lost."""
    value = copy.deepcopy(value)
    *parents, last = rng.choice(places(value)[1:])
    holder = value
    for key in parents:
        holder = holder[key]
    if rng.random() < 0.25:
        del holder[last]
    else:
        holder[last] = rng.choice(VALUES)
    return value


def damaged(path, count: int):
    """Damaged contents of a file."""
    content, values = path.read_bytes(), None
    if path.suffix in (".json", ".jsonl"):
        values = (
            [json.loads(line) for line in content.decode().splitlines()]
            if path.suffix == ".jsonl"
            else [json.loads(content)]
        )
    elif path.suffix == ".toml":
        values = [files.read_toml(path)]
    for seed in range(count):
        rng = random.Random(seed)
        if values is None or seed % 3 == 0:
            yield flipped(content, rng)
            continue
        at = rng.randrange(len(values))
        changed = [retyped(value, rng) if i == at else value for i, value in enumerate(values)]
        if path.suffix == ".toml":
            try:
                yield tomli_w.dumps(changed[0]).encode()
            except (TypeError, ValueError):  # TOML has no null
                yield flipped(content, rng)
        else:
            yield b"".join(json.dumps(value).encode() + b"\n" for value in changed)


def guarded(read) -> str:
    """What a read ends with: "" or the error; anything else than an error of the project, too many
    bytes or calls fail.
    """
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call"

    tracemalloc.start()
    sys.setprofile(count)
    try:
        read()
        return ""
    except (OSError, ValueError) as error:  # a ConfigError is a ValueError
        return str(error)
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < BYTES
        assert calls < CALLS


# The readers: {name: (a file that it reads, the function that reads it)}, made in a folder.


def of_config(folder, small):
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(configs.to_dict(small)))
    return path, lambda: configs.load(path)


def of_run(name):
    def make(folder, small):
        statistics = [{"step": 0, "statistics": {"a/output/input": {"amax": 1.0, "sqnr": 30.0}}}]
        run = made_runs.make(
            folder / "run", small, made_runs.falling(6), recipe="tensorwise", statistics=statistics
        ).path

        def read():
            found = runs.read(run)
            log.read_metrics(run)
            return (
                found.settings,
                found.versions,
                found.reference,
                found.ran,
                found.losses,
                found.bf16,
            )

        return run / name, read

    return make


def of_log(name, text):
    def make(folder, small):
        path = folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path, lambda: foreign_logs.read(path)

    return make


def of_events(folder, small):
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in range(4):
            writer.add_scalar("train/loss", 2.5 - step / 8, step, walltime=0)
    (path,) = folder.glob("events*")
    return path, lambda: foreign_logs.read(path)


def of_tensors(folder, small):
    path, values = folder / "tensors.npz", np.float32([[1, 2], [3, 4]])
    made = tensors.Tensors(
        operands={"a/input": values}, amaxes={"a/input": np.float32([1, 2])}, about={"step": 2}
    )
    tensors.write(path, made)
    return path, lambda: tensors.read(path)


def of_study(folder, small):
    path, x = folder / "study.npz", np.float32([[1, 2], [3, 4.0001]])
    made = recording.Recording(framework="torch", chosen=("a",))
    made.operands["a/input"] = recording.Operand(
        kept=x, amax=np.abs(x).max(), columns=np.abs(x).max(axis=0), rows=2
    )
    q = np.ones((1, 2, 4, 2), np.float32)
    made.attention["a"] = recording.Attended(layer="a", q=q, k=q[:, :1], v=q[:, :1], causal=True)
    made.write(path)
    return path, lambda: recording.read(path)


def of_gemm(which):
    def make(folder, small):
        path = gemm_recording._write(
            folder, "gemm", {"kind": "gemm", "plan": {}}, {"a": np.zeros((2, 4), np.uint8)}
        )
        return path.with_suffix(which), lambda: gemm_recording._read(path)

    return make


def of_failure(folder, small):
    metrics = {"step": 7, "loss": float("nan"), "grad_norm": 0.5}
    kept = failed_step.write(folder, FakeTrainer(small), small, np.zeros((4, 17)), metrics, Alone())
    return kept / "manifest.json", lambda: failed_step.read(kept)


def of_batch(folder, small):
    path = folder / "batch.npy"
    np.save(path, np.zeros((4, 17), np.int32))
    return path, lambda: failed_step._tokens(path)


def of_sidecar(folder, small):
    (folder / "a.bin").write_bytes(bytes(8))
    made = sidecar.File(tokens=4, sha256="0" * 64, sample="0" * 64)
    numbers = {"vocab_size": 256, "end_of_document": None, "dtype": "uint16", "max_id": 1}
    content = sidecar.Sidecar(
        format="fp8ref shards 2", source="text", tokenizer="bytes", files={"a.bin": made}, **numbers
    )
    return sidecar.write(folder, content), lambda: sidecar.read(folder)


def of_shard(folder, small):
    path = folder / "a.npy"
    np.save(path, np.arange(8, dtype=np.uint16))
    return path, lambda: shards._open("a", path, None, None, 256, {})


def of_tokenizer(folder, small):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    return path, lambda: tokenizers._eos_token(path)


def of_documents(folder, small):
    path = folder / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    return path, lambda: list(documents._jsonl(path, "text"))


def of_plan(folder, small):
    path = folder / "plan.json"
    unit = {"k": 32, "fraction_bits": 13, "rounding": "toward_zero"}
    path.write_text(
        json.dumps({"subject": "a:b", "plan": {"unit": unit, "promotion": 128, "epilogue": None}})
    )
    return path, lambda: hardware._probed(path)


def of_rates(folder, small):
    path = folder / "rates.json"
    path.write_text(json.dumps({"gpu": "H100", "bf16": 1e15, "fp8": 2e15}))
    return path, lambda: gpu_rates.of("h100", path)


def of_ablation(folder, small):
    path = folder / "losses.jsonl"
    path.write_text('{"backend": "jax"}\n{"baseline": [1.0, 2.0]}\n')
    return path, lambda: list(variants._lines(path))


def of_architecture(folder, small):
    path = folder / "config.json"
    path.write_text(json.dumps(described(LlamaConfig()) | {"auto_map": {"a": ["b"]}}))
    keys = ArchitectureConfig(kind="transformers", source=str(path))
    return path, lambda: user_model.without_code(user_model.configuration(keys))


def of_weights(name):
    def make(folder, small):
        (folder / "config.json").write_text(json.dumps(described(small.model)))
        save_file(
            {"a": np.zeros(2, np.float32)}, folder / "model.safetensors", metadata={"format": "pt"}
        )
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
        return folder / name, lambda: export.read(folder, small.model)

    return make


def of_start(folder, small):
    path, _ = of_weights("config.json")(folder, small)
    return path, lambda: ablation_start.weights_start(
        folder, "jax", None, DataConfig(sequence_length=16, batch_size=4)
    )


def of_vectors(folder, small):
    path = folder / "vectors.txt"
    path.write_text(
        "# fp8ref vectors 1: cast format=e4m3fn source=float32 seed=0 count=2\n3F800000 38\n"
        "40000000 40\n"
    )

    def read():
        with path.open("rb") as stream:
            _, found = vectors.read(stream, "cast", ["input"], ["answer"])
            [vector.number(0, 32, "input") for vector in found]

    return path, read


def of_own_tensors(name):
    def make(folder, small):
        arrays = {"a.weight": np.ones((3, 4), np.float32), "b": np.zeros(2, np.float16)}
        path = folder / name
        if path.suffix == ".npz":
            np.savez(path, **arrays)
        else:
            save_file(arrays, path)
        return path, lambda: own_tensors.read_file(path)

    return make


READERS = {
    "own.npz": of_own_tensors("own.npz"),
    "own.safetensors": of_own_tensors("own.safetensors"),
    "config.toml": of_config,
    "manifest.json": of_run("manifest.json"),
    "metrics.jsonl": of_run("metrics.jsonl"),
    "statistics.jsonl": of_run("statistics.jsonl"),
    ".lock": of_run(".lock"),
    "CSV": of_log("a.csv", "step,loss\n0,2.5\n1,2.25\n2,2.125\n"),
    "JSON Lines": of_log("a.jsonl", '{"step": 0, "loss": 2.5}\n{"step": 1, "loss": 2.25}\n'),
    "console": of_log(
        "a.log",
        "step:  1  loss:  2.5000  x\nstep:  2  loss:  2.2500  x\n iteration        1/     500 | "
        "lm loss: 1.0E+01 |\n",
    ),
    "TensorBoard": of_events,
    "tensors.npz": of_tensors,
    "study.npz": of_study,
    "gemm.npz": of_gemm(".npz"),
    "gemm.json": of_gemm(".json"),
    "failed step": of_failure,
    "batch.npy": of_batch,
    "shards.json": of_sidecar,
    "shard": of_shard,
    "tokenizer_config.json": of_tokenizer,
    "documents": of_documents,
    "plan": of_plan,
    "rates": of_rates,
    "ablation": of_ablation,
    "architecture": of_architecture,
    "config.json": of_weights("config.json"),
    "weights to ablate": of_start,
    "index": of_weights(INDEX),
    "safetensors": of_weights("model.safetensors"),
    "vectors": of_vectors,
}


UNNAMED = ("vectors", "gemm.json", "gemm.npz")
"""Readers whose callers name the file, and which raise ValueError alone."""


def check_reader(name, folder, small, count):
    path, read = READERS[name](folder, small)
    path.touch()
    guarded(read)  # imports what it needs
    ended = []
    for content in damaged(path, count):
        path.write_bytes(content)
        ended.append(guarded(read))
        assert not ended[-1] or name in UNNAMED or str(folder) in ended[-1], (
            "the message names no file"
        )
    assert any(ended) or name == ".lock", "no damage was refused"


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_an_error_of_the_project(name, tmp_path, small):
    check_reader(name, tmp_path, small, 60)


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_an_error_of_the_project_however_damaged(name, tmp_path, small):
    check_reader(name, tmp_path, small, 3000)


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["tensors.npz", "study.npz"])
def test_no_bit_of_arrays_changes_unseen(name, step, tmp_path, small):
    """Each bit of the file in turn, or each 29th: either it is refused, or it reads as it was
    written.
    """
    path, _ = READERS[name](tmp_path, small)
    content, written = path.read_bytes(), files.read_arrays(path)
    for at in range(0, 8 * len(content), step):
        changed = bytearray(content)
        changed[at // 8] ^= 1 << at % 8
        path.write_bytes(changed)
        try:
            found = files.read_arrays(path)
        except (OSError, ValueError):
            continue
        assert found.keys() == written.keys(), at
        for key, value in found.items():
            assert value.dtype == written[key].dtype
            np.testing.assert_array_equal(value, written[key])


def test_arrays_are_read_as_they_were_written(tmp_path):
    arrays = {
        "a/b": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "text": np.array("é"),
        "none": np.zeros((0, 3), np.uint8),
    }
    files.write_arrays(tmp_path / "a.npz", arrays)
    found = files.read_arrays(tmp_path / "a.npz")
    assert found.keys() == arrays.keys()
    for name, value in arrays.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(found[name], value)
    np.savez(tmp_path / "old.npz", **arrays)  # as it was written before there was a checksum
    assert files.read_arrays(tmp_path / "old.npz").keys() == arrays.keys()


def test_arrays_that_were_exchanged_are_refused(tmp_path):
    """Each is whole by the sums of zip, which a tool that writes the archive again makes anew."""
    path = tmp_path / "a.npz"
    files.write_arrays(path, {"a": np.arange(3), "b": np.arange(3) + 1})
    with np.load(path) as found:
        held = dict(found)
    for changed in (
        {"a": held["b"]},
        {"a": held["a"].astype(np.int32)},
        {"a": held["a"].reshape(3, 1)},
    ):
        np.savez(path, **(held | changed))
        with pytest.raises(
            ValueError, match="the checksum of its arrays differs from the saved one"
        ):
            files.read_arrays(path)


@pytest.mark.parametrize(
    ("at", "value"), [(-12, 2), (-22, 0), (-2, 1)], ids=["fewer arrays", "no end", "a comment"]
)
def test_the_directory_of_an_archive_is_whole(tmp_path, at, value):
    """zipfile reads neither the number of its entries nor what follows them: arrays could be
    missing.
    """
    path = tmp_path / "a.npz"
    files.write_arrays(path, {"a": np.arange(3), "b": np.arange(3)})
    content = bytearray(path.read_bytes())
    content[at] = value
    path.write_bytes(content + b"x" * (at == -2))
    with pytest.raises(
        ValueError, match=r"the directory of the archive is damaged|no intact archive"
    ):
        files.read_arrays(path)


def header(shape, descr="'<f8'") -> bytes:
    text = (
        f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode().ljust(117)
        + b"\n"
    )
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        header("(10**9,)"),
        header("(1000000000000000000,)"),
        header("(2**60, 2**60)"),
        header("(-1,)"),
        b"",
        b"x",
    ],
)
def test_a_claim_is_checked_before_memory_is_taken(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", content)
    assert guarded(lambda: files.read_array(tmp_path / "a.npy"))
    assert guarded(lambda: files.read_arrays(tmp_path / "a.npz"))


def test_a_bomb_is_refused_by_its_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ARRAYS", 2**20)
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(2**24, np.uint8))
    assert "it claims 16,777,344 bytes of arrays in a file of" in guarded(
        lambda: files.read_arrays(tmp_path / "a.npz")
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 65 + "]" * 65, "more than 64 levels"),
        ("[" * 100_000, "more than 64 levels"),
        ('{"a":' * 100_000, "more than 64 levels"),
        ('{"a": 1, "a": 2}', "an object has the key 'a' twice"),
        ('[{"b": {"a": 1, "a": 1}}]', "an object has the key 'a' twice"),
        ("9" * 5000, "Exceeds the limit"),
        ("\ufeff{}", "BOM"),
    ],
)
def test_json_has_limits(text, message):
    with pytest.raises(ValueError, match=message):
        files.parse_json(text)


@pytest.mark.parametrize("part", ["[],", "{},", '{"a":0},'])
@pytest.mark.parametrize("kind", [str, str.encode])
def test_json_of_many_lists_is_refused_before_they_are_made(monkeypatch, part, kind):
    monkeypatch.setattr(files, "OBJECTS", 1001)
    assert len(files.parse_json(kind(f"[{part * 999}[]]"))) == 1000
    assert (
        guarded(lambda: files.parse_json(kind(f"[{part * 1000}[]]")))
        == "it has more than 1,001 objects and lists"
    )


@pytest.mark.parametrize("kind", [str, str.encode])
def test_brackets_in_strings_of_json_are_no_lists(monkeypatch, kind):
    monkeypatch.setattr(files, "OBJECTS", 3)
    text = '[{"[[[[": "\\"{{\\\\"}, ["]"]]'
    assert files.parse_json(kind(text)) == [{"[[[[": '"{{\\'}, ["]"]]
    assert (
        guarded(lambda: files.parse_json(kind(f"[{text}]")))
        == "it has more than 3 objects and lists"
    )


def test_json_of_the_most_levels_is_read():
    assert files.parse_json("[" * 64 + "]" * 64)
    assert files.parse_json('{"a": [{"a": 1}, {"a": 2}]}') == {"a": [{"a": 1}, {"a": 2}]}


@pytest.mark.parametrize(
    "text",
    [
        "a=" + "[" * 50_000,
        "a=" + "{a=" * 50_000,
        ".".join("a" * 65) + "=1",
        "[" + " . ".join("a" * 50_000) + "]",
        '"a".' * 30_000 + "a=1",
    ],
)
def test_toml_has_limits(tmp_path, text):
    (tmp_path / "a.toml").write_text(text)
    assert guarded(lambda: files.read_toml(tmp_path / "a.toml")) == "it has more than 64 levels"


def test_brackets_and_dots_of_toml_s_strings_are_no_levels(tmp_path):
    text = f"""a = "{"[" * 90}" # {"[" * 90}\nb = '{"." * 90}'\nc = \"\"\"\\"\n{"{" * 90}\"\"\"\nd = [1.5, {"2.25, " * 90}]\n"""
    (tmp_path / "a.toml").write_text(text)
    assert files.read_toml(tmp_path / "a.toml").keys() == set("abcd")


@pytest.mark.parametrize(
    "read", [files.read_bytes, lambda path: list(files.read_lines(path)), files.read_arrays]
)
def test_what_may_never_end_is_not_read(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # which nobody writes to
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match="it is no regular file, but a pipe or a device"):
            read(path)
    with pytest.raises(IsADirectoryError):
        read(tmp_path)


def test_a_large_file_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse
    assert "larger than 1,000,000 bytes" in guarded(lambda: files.read_bytes(path, 10**6))
    monkeypatch.setattr(files, "LINE", 10**6)
    assert "a line of more than 1,000,000 bytes" in guarded(lambda: list(files.read_lines(path)))
    monkeypatch.setattr(files, "LOG", 10)
    path.write_bytes(b"123456\n" * 2)
    assert "larger than 10 bytes" in guarded(lambda: list(files.read_lines(path)))


@pytest.mark.parametrize("kind", ["pipe", "directory", "link to itself", "link to nothing"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_an_error_of_the_project(name, kind, tmp_path, small, monkeypatch):
    """Also for a pipe that nobody writes to: only documents and vectors may be piped."""
    path, read = READERS[name](tmp_path, small)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
        if name in ("documents", "vectors"):
            return
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(path if "itself" in kind else "absent")
    said = guarded(read)
    assert not said or name in UNNAMED or str(tmp_path) in said
    assert said or kind.startswith("link") or name in (".lock", "index")


def test_a_missing_key_names_the_file(tmp_path):
    (tmp_path / "a.json").write_text('{"a": {"b": 1}}')
    found = files.read_object(tmp_path / "a.json")
    with pytest.raises(ConfigError, match=r"a\.json has no 'c': it is damaged"):
        found["a"]["c"]


@pytest.mark.parametrize("key", ["files", "step", "backend", "config", "data"])
def test_a_forged_manifest_is_refused(tmp_path, small, key):
    """Its own sum is right: whoever changed it made it anew."""
    path = tmp_path / "checkpoints" / "step-00000003"
    (path / "state").mkdir(parents=True)
    about = {"step": 3, "backend": "torch", "config": configs.to_dict(small), "data": {}}
    for value in (*VALUES, "lost"):
        forged = {k: v for k, v in (about | {key: value}).items() if v != "lost"}
        content = {"format": 1, "files": {}, **forged}
        try:
            content["sha256"] = checkpoint._digest(content)
            (path / "manifest.json").write_text(json.dumps(content))
        except ValueError:
            continue
        said = guarded(lambda: export.export(tmp_path, tmp_path / "out", say=lambda _: None))
        assert "could not be written" not in said
        assert said


def test_brackets_behind_a_string_that_ends_in_a_quote_are_counted(tmp_path):
    """A string may end in four or five quotes, which begin no other one."""
    for quotes in ('"""', "'''"):
        path = tmp_path / "deep.toml"
        path.write_text(f"a = [{quotes}x{quotes}{quotes[0]}, {'[' * 5000}{']' * 5000}]")
        with pytest.raises(ValueError, match="levels"):
            files.read_toml(path)


def test_a_key_that_occurs_twice_among_many_is_named():
    many = ", ".join(f'"{i}": 0' for i in range(20_000))
    with pytest.raises(ValueError, match="has the key '7' twice"):
        files.parse_json(f'{{{many}, "7": 1}}')


@pytest.mark.parametrize(
    ("dtype", "shape"), [("|S0", (3_000_000_000,)), ("<f4", (True, 1)), ("<f4", (-1, -1))]
)
def test_an_array_of_an_impossible_claim_is_refused(dtype, shape, tmp_path):
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    path = tmp_path / "x.npy"
    content = b"" if dtype == "|S0" else bytes(4)
    path.write_bytes(
        b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + content
    )
    with pytest.raises(ValueError, match=r"an array"):
        files.read_array(path)
