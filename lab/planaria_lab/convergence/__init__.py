"""What losses cost in learning (docs/lab.md).

study.py reads a file of runs to compare, and schedule.py determines their losses of stages.
training.py trains a whole swarm in one process; averaging.py has its replicas, lessons.py its
relearning. runner.py executes many runs, and partial.py keeps unfinished ones. compare.py computes
figures, report.py makes tables and plots of them, and times.py converts iterations to seconds.
norms.py measures the weights of CheckFree's average. texts.py gathers text for larger models.
"""
