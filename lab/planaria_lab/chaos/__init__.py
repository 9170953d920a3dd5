"""Swarms of real processes on this machine under injected faults, and the losses that these cause.

`planaria lab chaos` (command.py) draws faults from a seed (schedule.py) and injects them into real
processes (swarm.py). It then computes lost steps and broken promises from the records (outcome.py),
and makes tables of them (report.py). Two modules are also used alone, for example in tests:

proxy.py is a TCP proxy in front of a node, which breaks the node's links. Start the node with
`--listen proxy.behind --advertise proxy.address`. Then `reset()` breaks all connections with RST,
and `await blink(every, seconds)` does so repeatedly. `hold(Way.IN)` stops all bytes to the node,
`hold(Way.OUT)` all bytes from it, and `release()` ends both. `python -m planaria_lab.chaos.proxy`
runs the proxy as a process of its own: it prints its addresses and obeys lines on standard input.

sick_node.py runs `planaria node` with faults that can be set from outside. Start `python -m
planaria_lab.chaos.sick_node --faults FILE node ...`, or give `run_sick` to `Processes`; then call
`set_faults(FILE, {"hang": {}})`. The node can hang, crawl, have a slow or full disk, or send wrong
numbers, shapes, dtypes and norms. Bits of its weights can flip.
"""
