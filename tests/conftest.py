"""One thread for torch, here and in child processes: the models are tiny and the cores are few."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is loaded
