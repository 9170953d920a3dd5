"""Loaded into the process that `Processes` forks from, and nowhere else: importing it ties that
process to the life of the one that started it."""

from planaria.node.local.processes import die_with_parent

die_with_parent()
