"""What to rent, and how to run it (docs/planning.md).

machines.py has the nodes and links, memory.py what a node holds, estimate.py what a run comes to in
closed form, handover.py what a notice of a machine's end is enough for; planner.py tries candidates
and chooses, asked.py has the run that is planned, and plan.py is the command `planaria plan`.
"""
