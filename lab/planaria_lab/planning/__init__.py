"""Plans which machines to rent for a run, and how to run it (lab/docs/planning.md).

machines.py reads the nodes and links, asked.py the run to plan. memory.py computes the memory of a
node, estimate.py the time of a run in closed form. handover.py computes what can be handed over
within a termination notice. planner.py compares candidates and chooses. plan.py is the command
`planaria plan`.
"""
