"""Simulates swarms: the seconds of a step, and of a run whose nodes come and go.

lab/docs/simulator.md explains the model. swarm.py describes the input. clock.py has the simulated
clock and the resources: cores, threads, links. step.py simulates one step, run.py a whole run.
reaction.py estimates the seconds that a loss costs, churn.py draws losses and replacements of
nodes. table2.py computes CheckFree's Table 2, check.py compares with live swarms, simulate.py is
the command.
"""
