"""A whole swarm on this machine: `planaria up`.

- `plan.py`: the run and its folders, before a process starts
- `machine_size.py`: whether this machine has the cores and the memory
- `swarm.py`: starts, kills and restarts nodes, which are forked from `fork_server.py`
- `results.py`: what the run leaves
- `resume.py`: what a run has saved, also for a run that continues with other settings
- `from_run.py`: a new run that begins from what another one has saved
- `loss_schedule.py`: which nodes are killed when (`--kill`, `--loss-rate`, `--trace`)
- `options.py`: the options of `planaria up`
- `from_python.py`: the same from Python: `planaria.load`, `planaria.up`
"""
