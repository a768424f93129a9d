import os
import signal
import threading

import pytest

from fp8ref.train.run import signals


def test_sigterm_is_remembered_and_ends_nothing():
    with signals.deferring_sigterm() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()


def test_afterwards_it_is_as_it_was():
    before = signal.getsignal(signal.SIGTERM)
    with signals.deferring_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_came_in_a_context_around_this_one_is_known():
    """As when SIGTERM comes while a framework loads."""
    with signals.deferring_sigterm() as outer:
        handler = signal.getsignal(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        with signals.deferring_sigterm() as inner:
            assert inner()
        assert signal.getsignal(signal.SIGTERM) is handler
        assert outer()
    with signals.deferring_sigterm() as again:
        assert not again()


def test_a_thread_leaves_it_alone():
    found = []

    def train():
        with signals.deferring_sigterm() as asked:
            found.append((asked(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found == [(False, signal.getsignal(signal.SIGTERM))]


@pytest.fixture
def foreground():
    """A shell's background jobs ignore Ctrl-C, and Python with them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_is_remembered_and_the_second_ends_it(capfd, foreground):
    with signals.deferring_ctrl_c() as asked:
        assert not asked()
        os.kill(os.getpid(), signal.SIGINT)
        assert asked()
        assert "The run stops after this step" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_is_remembered_though_nobody_reads_what_it_says(monkeypatch, foreground):
    """Whoever reads standard error, such as tee, has ended of the same Ctrl-C."""

    def broken(*_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(signals.os, "write", broken)
    with signals.deferring_ctrl_c() as asked:
        signal.raise_signal(signal.SIGINT)
        assert asked()


def test_another_handler_of_ctrl_c_is_left_alone():
    """As in a shell's background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.deferring_ctrl_c() as asked:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert not asked()
    finally:
        signal.signal(signal.SIGINT, before)
