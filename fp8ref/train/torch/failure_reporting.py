"""What the processes of a run tell each other before they end, so that those which lose one can say which, and why.

The words lie in the store at which the processes met. torchrun keeps it; without torchrun process 0 does, and it ends with that process.
"""

import contextlib
import itertools
import json
import signal
import threading
import time
from typing import Literal

from torch import distributed

SECONDS = 2.0  # that the others' words may take, once a process has noticed that one is gone
TURNS = 10  # of asking before the last silent one is taken to be gone: its word may still be on its way
LINGER = 1.0  # that the process which keeps the store stays, for the others to read


class LastWords:
    """One process's."""

    def __init__(self, store: distributed.TCPStore, rank: int, ranks: int, *, kept_by_first: bool) -> None:
        self._store, self._rank, self._ranks, self._kept_by_first = store.clone(), rank, ranks, kept_by_first  # type: ignore[attr-defined]

    def leave(self, error: BaseException) -> None:
        """Say what ends this process."""
        self._say(cause="Ctrl-C" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}")

    def which(self, *, waited: bool, timeout_s: int) -> str:
        """Which of the others is gone, and why; for a person. waited: whether this process waited for it in vain, for timeout_s."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's to all, once one is gone; this one is about to end, and first says why
        words, store = self._listen() if self._say(waited=waited) else ({}, "fails")
        if self._kept_by_first and self._rank == 0:
            time.sleep(LINGER)
        causes = [f"process {rank} ended: {word['cause']}" for rank, word in sorted(words.items()) if "cause" in word]
        if causes:
            return "; ".join(causes)
        silent = [rank for rank in range(self._ranks) if rank != self._rank and rank not in words]
        if store != "answers" and self._kept_by_first:
            silent = [0]
        if not silent:
            return "no process ended, but their connection broke"
        who = f"process {' and '.join(map(str, silent))}"
        if waited or store == "hangs" or any(word["waited"] for word in words.values()):
            return f"{who} did not answer within {timeout_s} s (parallel.timeout_s): it stands still, or is slower than that"
        if store == "fails":
            return f"{who} is gone; what it printed, if anything, is why"
        return f"{who} is gone without a word: killed, perhaps for want of memory"

    def _say(self, **word) -> bool:
        """Whether the store is still there."""
        with contextlib.suppress(distributed.DistError):  # nobody is there to read it
            self._store.set(_key(self._rank), json.dumps(word))
            return True
        return False

    def _listen(self) -> tuple[dict[int, dict], Literal["answers", "fails", "hangs"]]:
        """The others' words by rank, and what the store does. Ends with a word that has a cause, or when all have spoken but one.

        A thread asks: no timeout of the store's acts where the process that keeps it stands still.
        """
        found: dict[int, dict] = {}
        answered = threading.Event()

        def ask() -> None:
            with contextlib.suppress(distributed.DistError):
                for turn in itertools.count():
                    for rank in range(self._ranks):
                        if rank != self._rank and rank not in found and self._store.check([_key(rank)]):
                            found[rank] = json.loads(self._store.get(_key(rank)))
                    answered.set()
                    if any("cause" in word for word in found.values()) or (len(found) >= self._ranks - 2 and turn >= TURNS):
                        return
                    time.sleep(0.02)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(SECONDS)
        return dict(found), "answers" if answered.is_set() else "hangs" if asking.is_alive() else "fails"


def _key(rank: int) -> str:
    return f"fp8ref/last_words/{rank}"
