"""Swarms in simulated time: the seconds of a step, and of a run whose nodes come and go.

docs/simulator.md explains the model. swarm.py has the input, clock.py has the time and what takes
it; step.py is one step, reaction.py what a loss takes, churn.py how machines come and go, and
run.py a whole run of these. table2.py is CheckFree's table, check.py the comparison with live
swarms, simulate.py the command.
"""
