import pytest

from fp8ref.shared import registry

TABLE = {"one": 1, "two": 2}


def test_a_name_gives_its_entry_and_an_instance_itself():
    assert registry.lookup("number is an int or", TABLE, "two", int) == 2
    assert registry.lookup("number is an int or", TABLE, 7, int) == 7


@pytest.mark.parametrize("key", ["three", None, 7, ["one"]], ids=repr)
def test_anything_else_is_refused_by_the_names_there_are(key):
    with pytest.raises(ValueError, match=r"^number is one of one, two; got .*\.$"):
        registry.lookup("number is", TABLE, key)


def test_a_mistyped_name_is_answered_by_the_nearest():
    with pytest.raises(ValueError, match=r"got 'tow'\. Did you mean 'two'\?$"):
        registry.lookup("number is", TABLE, "tow")
