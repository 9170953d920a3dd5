"""Loaded into the process that `Processes` forks from, and nowhere else: importing it ties that
process to the life of the one that started it.

What ends a whole process group (a terminal that closes, systemd, `timeout`) is for that one to
hear: were this process gone, its children would be, before they have saved.
"""

import signal

from planaria.node.machine.processes import die_with_parent

die_with_parent()
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
