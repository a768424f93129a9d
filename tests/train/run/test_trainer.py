"""The trainers of both backends have what ``fp8ref.train.run.trainer`` says.

What it does is tested with them.
"""

import importlib
import inspect

import pytest

from fp8ref.train import loop
from fp8ref.train.run import trainer


@pytest.mark.parametrize("backend", loop.BACKENDS)
def test_a_trainer_takes_what_the_loop_gives(backend):
    own = importlib.import_module(f"fp8ref.train.{backend}.trainer").Trainer
    for protocol in (trainer.Trainer, trainer.Provable):
        for name, method in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_"):
                wanted = [
                    key
                    for key, one in inspect.signature(method).parameters.items()
                    if one.default is one.empty
                ]
                assert [*inspect.signature(getattr(own, name)).parameters][
                    : len(wanted)
                ] == wanted, name
