from fp8ref.shared import package_data

TEXT = """
names = ["a", "b"]

[late]
like = "early"
eps = 2.0

[early]
eps = 1.0
sizes = [[1, 2], [3]]

[later]
like = "late"
"""


def test_tables_have_the_keys_of_those_that_they_are_like(tmp_path):
    (tmp_path / "rules.toml").write_text(TEXT, encoding="utf-8")
    early = {"eps": 1.0, "sizes": ((1, 2), (3,))}
    assert package_data.tables(str(tmp_path / "module.py"), "rules") == {
        "names": ("a", "b"),
        "late": early | {"eps": 2.0},
        "early": early,
        "later": early | {"eps": 2.0},
    }
