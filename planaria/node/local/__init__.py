"""A whole swarm on this machine: `planaria up`.

- `swarm.py`: starts, kills, restarts and sums up; nodes are forked from `fork_server.py`
- `resume.py`: what a run has saved, also for a run that continues with other settings
- `from_run.py`: a new run that begins from what another one has saved
- `loss_schedule.py`: which nodes are killed when (`--kill`, `--failure-rate`)
- `options.py`: the options of `planaria up`
- `from_python.py`: the same from Python: `planaria.load`, `planaria.up`
"""
