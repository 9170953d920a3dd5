"""Planning before machines are rented, and tests of the papers' claims.

planaria imports nothing of it: command.py adds `planaria lab` and `planaria plan` to its command by
entry points. `convergence`: what losses cost in learning. `emulation`: live swarms behind links
with delay and bandwidth. `chaos`: live swarms under injected faults. `saves`: what writing
them costs a live swarm. `simulator`: swarms in simulated time. `planning`: what to rent. `scar` and
`spare`: the experiments of two papers. `bench`: measurements, each beside a
reference. gpu.py: measurements on a card that is borrowed. origin.py: where a row of results comes
from, and which rows are a pair. evidence.py: what pages claim without rows. lines.py: distinct
styles of lines in plots. choices.py: rows of snapshots, otherwise chosen than by nodes. contest.py:
seconds a step by the meter of a published contest.
"""
