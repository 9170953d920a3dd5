"""What losses cost in learning (docs/lab.md).

study.py is a file of runs to compare, schedule.py says which stages are lost when, training.py is a
whole swarm in one process, averaging.py its replicas, as far as they average, lessons.py stages of
it that relearn. runner.py runs many, each kept by partial.py while it is under way. compare.py has
the figures, report.py tables and plots of them, times.py turns iterations to seconds. norms.py:
what the average's weights are. texts.py gathers text for larger models.
"""
