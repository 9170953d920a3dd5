"""Swarms on this machine under injected faults, and the damage that these do.

`planaria lab chaos` (command.py) draws faults from a seed (schedule.py), carries them out on real
processes (swarm.py), finds what was lost by them and which promises were broken (outcome.py), and
makes tables of it (report.py). Two parts are of use by themselves, as in tests:

proxy.py is in front of a node and breaks its links. A node is started with `--listen
proxy.behind --advertise proxy.address`; then `reset()` breaks all connections with RST, `await
blink(every, seconds)` does so again and again, `hold(Way.IN)` passes nothing on towards the node,
`hold(Way.OUT)` nothing from it, and `release()` heals. `python -m planaria_lab.chaos.proxy` is the
same as a process of its own, which prints where it is and obeys lines on its standard input.

sick_node.py is `planaria node` on a machine with faults: start `python -m
planaria_lab.chaos.sick_node --faults FILE node ...`, or give `run_sick` to `Processes`, and
`set_faults(FILE, {"hang": {}})`. It can hang and crawl, have a slow or a full disk, and send wrong
numbers, shapes, dtypes and norms; its weights can flip.
"""
