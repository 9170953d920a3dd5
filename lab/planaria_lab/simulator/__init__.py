"""Swarms in simulated time: what a step takes, and what becomes of a run as nodes come and go.

docs/simulator.md tells how. swarm.py says what is simulated, clock.py has the time and what takes
it; step.py is one step, reaction.py what a loss takes, churn.py how machines come and go, and
run.py a whole run of these. table2.py is CheckFree's table, check.py the comparison with live
swarms, simulate.py the command.
"""
