"""Signals that ask a process to end."""

import asyncio
import signal
from collections.abc import Callable


def on_stop_signals(stop: Callable[[int], object]) -> None:
    """Has the running loop call `stop` with the number of each signal that asks this process to
    end. Ctrl-C and hangup don't count if inherited as ignored, in the background of a script or by
    nohup."""
    loop = asyncio.get_running_loop()
    heeded = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    for number in (signal.SIGTERM, *heeded):
        loop.add_signal_handler(number, stop, number)
