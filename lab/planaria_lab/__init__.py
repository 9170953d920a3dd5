"""The lab: it measures what losses cost, repeats papers' experiments, and plans what to rent.

The package `planaria` imports nothing from here. command.py adds the commands `planaria lab` and
`planaria plan` by entry points. `convergence`: what losses cost in learning. `emulation`: live
swarms behind links with delay and bandwidth. `chaos`: live swarms under injected faults. `saves`:
what saves cost a live swarm. `simulator`: swarms in simulated time. `planning`: what to rent.
`scar` and `spare`: the experiments of two papers. `bench`: measurements, each beside a reference.
gpu.py: measurements on a borrowed GPU. origin.py: where a row of results comes from, and which rows
may be compared. evidence.py: finds claims in pages that no rows support. lines.py: distinct styles
of lines in plots. choices.py: ways to choose the next rows of a running snapshot. contest.py:
seconds a step by the meter of a published contest.
"""
