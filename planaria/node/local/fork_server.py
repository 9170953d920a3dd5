"""Preloaded by the fork server of `Processes` only: importing it ties the process to its parent's
life.

It ignores signals to the whole process group (terminal closed, systemd, `timeout`), which are for
the parent. If the fork server ended, its children would, before they have saved.
"""

import signal

from planaria.node.machine.processes import die_with_parent

die_with_parent()
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
