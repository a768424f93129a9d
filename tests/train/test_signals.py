import os
import signal
import threading

from fp8ref.train import signals


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
