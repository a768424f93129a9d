"""The directory of a checkpoint, whatever its tensors are: here a file of bytes."""

import json
import os
import pickle
import shutil
import threading
import types

import pytest

from fp8ref.shared.errors import ConfigError
from fp8ref.train.run import checkpoint
from fp8ref.train.run.checkpoint import Checkpoints, latest, saved, verify
from fp8ref.train.run.processes import Alone


class Bytes:
    """A model whose state is its content; ``save`` waits for ``gate`` before it is written."""

    def __init__(self, content=b"state"):
        self.content = content
        self.gate = threading.Event()
        self.gate.set()

    def save(self, directory):
        content = self.content

        def write():
            self.gate.wait(10)
            directory.mkdir()
            (directory / "tensors.bin").write_bytes(content)

        return write


def checkpoints(out, keep_last=2, **about) -> Checkpoints:
    return Checkpoints(out, about, keep_last=keep_last, processes=Alone())


def save(out, *steps, keep_last=2, content=b"state") -> None:
    writer = checkpoints(out, keep_last, note="kept")
    for step in steps:
        writer.save(Bytes(content), step)
    writer.finish()


def names(out) -> list[str]:
    return sorted(p.name for p in (out / "checkpoints").iterdir())


def damage(path, how) -> None:
    file = path / "state" / "tensors.bin"
    if how == "flipped":
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "missing":
        file.unlink()
    elif how == "added":
        (path / "state" / "more.safetensors").write_bytes(b"")
    elif how == "manifest":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"note": "kept"', '"note": "keep"'))
    elif how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "torn manifest":
        (path / "manifest.json").write_text((path / "manifest.json").read_text()[:-9])
    elif how == "nested manifest":
        (path / "manifest.json").write_text("[" * 100_000)
    elif how == "format":
        (path / "manifest.json").write_text('{"format": 2}')


DAMAGES = {
    "flipped": "tensors.bin is damaged: its sha256",
    "truncated": "tensors.bin has 4 bytes; 5 were written",
    "missing": "tensors.bin is missing",
    "added": "more.safetensors is not one of its files",
    "manifest": "manifest.json was changed",
    "no manifest": "manifest.json cannot be read",
    "torn manifest": "manifest.json cannot be read",
    "nested manifest": "manifest.json cannot be read",
}


def test_a_checkpoint_is_its_state_and_a_manifest_of_it(tmp_path):  # K-1
    save(tmp_path, 3)
    found = latest(tmp_path, print)
    assert (found.step, found.path.name, found.manifest["note"]) == (3, "step-00000003", "kept")
    assert (found.state / "tensors.bin").read_bytes() == b"state"
    assert found.manifest["files"]["state/tensors.bin"]["bytes"] == 5


def test_only_the_newest_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 10, keep_last=2)
    assert names(tmp_path) == ["step-00000003", "step-00000010"]
    assert [p.name for p in saved(tmp_path)] == ["step-00000010", "step-00000003"]


def test_of_a_checkpoint_that_is_a_link_the_link_goes(tmp_path):  # K-1
    """As where old ones were moved to another disk."""
    save(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step-00000001").rename(tmp_path / "moved")
    (tmp_path / "checkpoints" / "step-00000001").symlink_to(tmp_path / "moved")
    (tmp_path / "checkpoints" / "step-00000000.unfinished").symlink_to(tmp_path / "moved")
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert verify(tmp_path / "moved")["step"] == 1


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, how):  # K-3
    save(tmp_path, 1, 2)
    damage(tmp_path / "checkpoints" / "step-00000002", how)
    said = []
    assert latest(tmp_path, said.append).step == 1
    assert len(said) == 1
    assert DAMAGES[how] in said[0]
    assert "kept as step-00000002.damaged" in said[0]
    assert names(tmp_path) == ["step-00000001", "step-00000002.damaged"]
    save(tmp_path, 2)  # the run comes there again
    assert latest(tmp_path, said.append).step == 2


def test_another_versions_checkpoint_is_not_passed_over(tmp_path):  # K-3
    save(tmp_path, 1, 2)
    damage(tmp_path / "checkpoints" / "step-00000002", "format")
    with pytest.raises(
        ConfigError,
        match=r"has format 2; this fp8ref reads format 1\. Use the version that wrote it",
    ):
        latest(tmp_path, print)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_where_none_is_intact_nothing_is_trained_over_them(tmp_path):  # K-3
    save(tmp_path, 1)
    damage(tmp_path / "checkpoints" / "step-00000001", "flipped")
    with pytest.raises(
        ConfigError, match=r"no checkpoint of .* is intact: .*tensors.bin is damaged.*--overwrite"
    ):
        latest(tmp_path, print)
    assert names(tmp_path) == ["step-00000001"]


def test_one_that_cannot_be_read_is_not_called_damaged(tmp_path, monkeypatch):  # K-3
    """A disk or a right that fails says nothing about the bytes."""
    save(tmp_path, 1, 2)

    def refused(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint.files, "read_bytes", refused)
    with pytest.raises(PermissionError, match=r"step-00000002/manifest\.json"):
        latest(tmp_path, print)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_strangers_files_among_them_are_left_alone(tmp_path):
    save(tmp_path, 1)
    mine = [
        tmp_path / "checkpoints" / name
        for name in ("notes.unfinished", "step-00000007.removed", "step-00000008")
    ]
    for path in mine:
        path.write_text("mine")
    save(tmp_path, 2)
    assert latest(tmp_path, print).step == 2
    assert [path.read_text() for path in mine] == ["mine"] * 3


def test_a_pipe_among_its_files_is_none_of_them(tmp_path):  # K-5
    """A reader would wait for its writer."""
    save(tmp_path, 1)
    os.mkfifo(tmp_path / "checkpoints" / "step-00000001" / "state" / "more.safetensors")
    with pytest.raises(ConfigError, match=r"state/more\.safetensors is not one of its files"):
        verify(tmp_path / "checkpoints" / "step-00000001")


def test_without_checkpoints_there_is_none(tmp_path):
    assert latest(tmp_path, print) is None


def test_a_manifest_that_is_no_object_is_refused(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"manifest.json cannot be read"):
        verify(tmp_path / "checkpoints" / "step-00000001")


def test_until_it_is_whole_it_has_no_name_of_a_checkpoint(tmp_path):  # K-1
    save(tmp_path, 1)
    writer, model = checkpoints(tmp_path), Bytes()
    model.gate.clear()
    writer.save(model, 2)  # returns: training goes on
    model.content = b"later"  # what is written is the state as it was
    assert names(tmp_path) == ["step-00000001", "step-00000002.unfinished"]
    assert latest(tmp_path, print).step == 1
    model.gate.set()
    writer.finish()
    assert (latest(tmp_path, print).state / "tensors.bin").read_bytes() == b"state"


def test_what_a_killed_process_leaves_is_cleared_away(tmp_path):  # K-1
    save(tmp_path, 1)
    for rest in ("step-00000002.unfinished", "step-00000000.removed"):
        (tmp_path / "checkpoints" / rest / "state").mkdir(parents=True)
    checkpoints(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("cut", ["write", "manifest", "rename"])
def test_a_disk_that_is_full_leaves_the_ones_before(tmp_path, monkeypatch, cut):  # K-4
    save(tmp_path, 1)
    model, writer = Bytes(), checkpoints(tmp_path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if cut == "write":
        monkeypatch.setattr(model, "save", lambda directory: full)
    else:
        monkeypatch.setattr(checkpoint.os, "fsync" if cut == "manifest" else "replace", full)
    writer.save(model, 2)
    with pytest.raises(
        OSError,
        match=r"checkpoint .*checkpoints/step-00000002 could not be written: .*No space "
        r"left.*make room, and continue with --resume",
    ):
        writer.finish()
    writer.finish()  # told once
    monkeypatch.undo()
    assert not list((tmp_path / "checkpoints").glob("*.unfinished"))  # there is room again
    assert latest(tmp_path, print).step == 1


def test_a_checkpoint_that_has_no_room_is_not_begun(tmp_path, monkeypatch):  # K-4
    writer = Checkpoints(tmp_path, {}, keep_last=2, processes=Alone(), size=10**9)
    monkeypatch.setattr(
        checkpoint.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=2 * 10**6)
    )
    with pytest.raises(
        OSError,
        match=r"checkpoint step-00000002 takes 1,000 MB, and .*checkpoints has 2 MB left\. "
        r".*make room",
    ):
        writer.save(Bytes(), 2)
    assert names(tmp_path) == []


def test_an_error_is_told_at_the_next_step_not_waited_for(tmp_path):
    writer, model = checkpoints(tmp_path), Bytes()
    model.gate.clear()
    writer.save(model, 1)
    assert writer.error() is None  # not done: nothing to tell
    shutil.rmtree(tmp_path / "checkpoints")
    model.gate.set()
    writer._thread.shutdown(wait=True)
    assert isinstance(writer.error(), OSError)
    assert "could not be written" in str(writer.error())


class Evil:
    def __reduce__(self):
        return os.mkdir, ("read",)


def test_a_planted_pickle_is_refused_unread(tmp_path, monkeypatch):  # K-5
    monkeypatch.chdir(tmp_path)
    save(tmp_path, 1)
    for name in (".metadata", "state/.metadata", "state/shard.pt"):
        path = tmp_path / "checkpoints" / "step-00000001" / name
        path.write_bytes(pickle.dumps(Evil()))
        with pytest.raises(
            ConfigError, match=f"{name.removeprefix('state/')} is not one of its files"
        ):
            verify(tmp_path / "checkpoints" / "step-00000001")
        path.unlink()
    assert not (tmp_path / "read").exists()


def test_a_manifest_is_json_that_every_reader_takes(tmp_path):
    save(tmp_path, 1)
    constants = []
    json.loads(
        (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").read_text(),
        parse_constant=constants.append,
    )
    assert constants == []
