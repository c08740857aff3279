"""StopSignals: a request to stop (Slurm's pre-emption, an operator), noted now and acted upon between steps."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """Notes SIGTERM and SIGUSR1 instead of dying of them.

    A signal reaches one rank, a node, or all, at different moments; whoever uses this agrees with the other ranks
    between two steps about `received`.
    """

    def __init__(self) -> None:
        self.received = 0
        """Number of the signal, 0 for none."""
        self._previous = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def restore(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def signal_name(number: int) -> str:
    """SIGTERM for 15."""
    return signal.Signals(number).name
