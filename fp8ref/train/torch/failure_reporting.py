"""Failure reports between processes: one that loses another can name it, and say why it ended.

Each process writes a report to the rendezvous store before it ends. torchrun hosts the store;
without torchrun process 0 does, and the store ends with that process.
"""

import contextlib
import itertools
import json
import signal
import threading
import time
from typing import Literal

from torch import distributed

SECONDS = 2.0
"""How long a process waits for the others' reports, once it has noticed a loss."""

TURNS = 10
"""Polls before the last silent process is taken for the lost one: its report may be on its way."""

LINGER = 1.0
"""How long the process that hosts the store stays, in seconds, so that the others can read it."""


class FailureStore:
    """One process's access to all reports; kept_by_first: whether process 0 hosts the store."""

    def __init__(
        self, store: distributed.TCPStore, rank: int, ranks: int, *, kept_by_first: bool
    ) -> None:
        self._store = store.clone()  # type: ignore[attr-defined]
        self._rank, self._ranks, self._kept_by_first = rank, ranks, kept_by_first

    def report(self, error: BaseException) -> None:
        """Report the error that ends this process."""
        text = f"{type(error).__name__}: {error}"
        self._post(cause="Ctrl-C" if isinstance(error, KeyboardInterrupt) else text)

    def diagnose(self, *, waited: bool, timeout_s: int) -> str:
        """Which process is gone, and why: a sentence for the user.

        waited: noticed by a timeout, after timeout_s, and not by a broken connection.
        """
        # torchrun then sends SIGTERM to all. This one ends anyway, but first finds out why.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        reports, store = self._collect() if self._post(waited=waited) else ({}, "fails")
        if self._kept_by_first and self._rank == 0:
            time.sleep(LINGER)
        causes = [
            f"process {rank} ended: {report['cause']}"
            for rank, report in sorted(reports.items())
            if "cause" in report
        ]
        if causes:
            return "; ".join(causes)
        others = (rank for rank in range(self._ranks) if rank != self._rank)
        silent = [rank for rank in others if rank not in reports]
        if store != "answers" and self._kept_by_first:
            silent = [0]
        if not silent:
            return "no process ended, but their connection broke"
        who = f"process {' and '.join(map(str, silent))}"
        if waited or store == "hangs" or any(report["waited"] for report in reports.values()):
            return (
                f"{who} did not answer within {timeout_s} s (parallel.timeout_s): it hangs, or "
                "is slower than that"
            )
        if store == "fails":
            return f"{who} is gone; its output, if any, shows why"
        return f"{who} ended without a message: killed, perhaps because memory ran out"

    def _post(self, **report) -> bool:
        """Write this process's report. Returns whether the store still answers."""
        with contextlib.suppress(distributed.DistError):  # the store is gone
            self._store.set(_key(self._rank), json.dumps(report))
            return True
        return False

    def _collect(self) -> tuple[dict[int, dict], Literal["answers", "fails", "hangs"]]:
        """{rank: report} of the other processes, and the state of the store.

        Ends at the first report with a cause, or when all but one process have reported. A thread
        polls the store: its own timeout does not act if the process that hosts it hangs.
        """
        reports: dict[int, dict] = {}
        answered = threading.Event()

        def poll() -> None:
            with contextlib.suppress(distributed.DistError):
                for turn in itertools.count():
                    for rank in range(self._ranks):
                        silent = rank != self._rank and rank not in reports
                        if silent and self._store.check([_key(rank)]):
                            reports[rank] = json.loads(self._store.get(_key(rank)))
                    answered.set()
                    if any("cause" in report for report in reports.values()) or (
                        len(reports) >= self._ranks - 2 and turn >= TURNS
                    ):
                        return
                    time.sleep(0.02)

        polling = threading.Thread(target=poll, daemon=True)
        polling.start()
        polling.join(SECONDS)
        if answered.is_set():
            return dict(reports), "answers"
        return dict(reports), "hangs" if polling.is_alive() else "fails"


def _key(rank: int) -> str:
    return f"fp8ref/failures/{rank}"
