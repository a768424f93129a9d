import os

import pytest

from fp8ref.shared.errors import ConfigError
from fp8ref.train.config.sections import DataConfig
from fp8ref.train.data import sources


def find(source, **keys) -> sources.Source:
    return sources.find(DataConfig(source=str(source), **keys))


@pytest.fixture
def tree(tmp_path):
    """tree("a.bin", ...) makes files with a byte in them."""

    def make(*names):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
        return tmp_path

    return make


def test_a_directory_is_searched_and_ordered_by_relative_path(tree):  # D-4
    root = tree("b/c.bin", "a.npy", "b.bin")
    found = find(root)
    assert found.kind == "shards"
    assert [name for name, _ in found.files] == ["a.npy", "b.bin", "b/c.bin"]


@pytest.mark.parametrize("pattern", ["*/x.bin", "**/x.bin"])
def test_a_pattern_names_files_relative_to_what_they_share(tree, pattern):
    root = tree("one/x.bin", "two/x.bin", "two/y.bin")
    assert [name for name, _ in find(root / pattern).files] == ["one/x.bin", "two/x.bin"]


def test_a_file_is_a_source(tree):
    root = tree("x.parquet", "y.parquet")
    assert find(root / "x.parquet") == sources.Source(
        kind="documents", files=(("x.parquet", root / "x.parquet"),)
    )


def test_hidden_folders_are_not_searched_for_shards(tree):
    """A prepare that was killed leaves its unfinished shards in one."""
    root = tree("a.bin", ".tokens.x/shards/train-00000.bin")
    assert [name for name, _ in find(root).files] == ["a.bin"]


@pytest.mark.parametrize("name", ["deep/b.bin", "deep/b.txt"])
def test_a_directory_that_may_not_be_read_is_named(tree, monkeypatch, name):
    """Not left out unseen."""
    root = tree(name.replace("deep/b", "a"), name)
    real = os.scandir

    def denied(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(ConfigError, match=r"deep cannot be read \(Permission denied\)"):
        find(root)


# D-1
def test_folders_of_the_standard_library_that_are_left_out_are_not_read_at_all(tree, monkeypatch):
    """site-packages may hold sixty times as many files."""
    root = tree(
        "a.py",
        "email/b.py",
        "email/notes.txt",
        "site-packages/deep/c.py",
        "email/test/d.py",
        "test.py",
    )
    real = os.scandir

    def denied(path):
        if {"site-packages", "test"} & set(os.fspath(path).split(os.sep)):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", denied)
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(root))
    assert [name for name, _ in find("stdlib").files] == ["a.py", "email/b.py", "test.py"]


def test_a_link_to_a_file_is_read_and_one_to_a_directory_is_not_followed(tree):  # D-4
    root = tree("top/a.bin", "elsewhere/b.bin", "c.bin") / "top"
    (root / "deep").symlink_to(root.parent / "elsewhere")
    (root / "round").symlink_to(root)
    (root / "c.bin").symlink_to(root.parent / "c.bin")
    assert [name for name, _ in find(root).files] == ["a.bin", "c.bin"]
    assert [name for name, _ in find(root / "deep").files] == ["b.bin"]


def test_a_name_of_the_hub_is_not_looked_for_on_disk():
    assert find("hf:org/name").kind == "hub"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["a.bin", "readme.md"],
            r"holds shards \(a.bin\) and text \(readme.md\).*'.*/\*\*/\*.bin'",
        ),
        (["a.bin", "b.jsonl"], r"names documents \(b.jsonl\) and shards \(a.bin\)"),
        (["a.png"], r"holds no \.md, \.py, \.txt files with text in them, no token shards"),
    ],
)
def test_a_directory_of_more_than_one_kind_or_none_is_refused(tree, names, said):
    with pytest.raises(ConfigError, match=said):
        find(tree(*names))


@pytest.mark.parametrize(
    ("source", "said"),
    [("absent/*.bin", "matches no file"), ("*", "matches a.png"), ("a.png", "is not a directory")],
)
def test_what_names_nothing_that_is_read_is_refused(tree, monkeypatch, source, said):
    monkeypatch.chdir(tree("a.png", "b.bin"))
    with pytest.raises(ConfigError, match=said):
        find(source)


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("a.bin", {"tokenizer": "t.json"}, "data.tokenizer is set, and .* which is shards"),
        (
            "a.bin",
            {"end_of_document": "", "text_column": "t"},
            "data.end_of_document, data.text_column are set",
        ),
        (
            "a.jsonl",
            {"token_dtype": "uint16"},
            "data.token_dtype is set, and .* which is documents",
        ),
        ("a.txt", {"text_column": "t"}, "data.text_column is set, and .* which is text"),
    ],
)
def test_a_key_that_a_kind_has_no_use_for_is_refused(tree, name, keys, said):
    root = tree(name)
    with pytest.raises(ConfigError, match=said):
        find(root, **keys)


@pytest.mark.parametrize(
    ("name", "validation"),
    [
        ("val.bin", True),
        ("fineweb_val_000000.bin", True),
        ("validation-00000-of-00001.parquet", True),
        ("Valid.npy", True),
        ("val/0.bin", True),
        ("train.bin", False),
        ("interval.bin", False),
        ("values.bin", False),
    ],
)
def test_files_are_for_validation_by_a_word_of_their_names(name, validation):  # D-5
    assert sources.is_validation(name) == validation
