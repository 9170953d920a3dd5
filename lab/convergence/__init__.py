"""What losses cost in learning (docs/lab.md).

study.py is a file of runs to compare, schedule.py says which stages are lost when, training.py is a
whole swarm in one process, runner.py runs many. compare.py has the figures, report.py tables and
plots of them, times.py turns iterations to seconds. norms.py: what the average's weights are.
"""
