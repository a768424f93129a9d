from contextvars import ContextVar

import pytest

from fp8ref.shared import contexts


def test_a_variable_has_the_value_of_the_innermost_context():
    variable = ContextVar("variable", default=0)
    with contexts.setting(variable, 1):
        with contexts.setting(variable, 2):
            assert variable.get() == 2
        assert variable.get() == 1
    assert variable.get() == 0


def test_the_value_before_returns_after_an_error():
    variable = ContextVar("variable", default=0)
    with pytest.raises(KeyError), contexts.setting(variable, 1):
        raise KeyError
    assert variable.get() == 0
