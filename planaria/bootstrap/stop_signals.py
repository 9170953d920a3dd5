"""Signals that ask a process to end."""

import asyncio
import signal


def stop_signals() -> asyncio.Future[int]:
    """Future of the number of the first signal that asks this process to end. Ctrl-C and hangup
    don't count if inherited as ignored, in the background of a script or by nohup."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[int] = loop.create_future()

    def on_signal(number: int) -> None:
        if not stop.done():
            stop.set_result(number)

    heeded = [n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    for number in (signal.SIGTERM, *heeded):
        loop.add_signal_handler(number, on_signal, number)
    return stop
