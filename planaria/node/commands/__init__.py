"""The subcommands of `planaria`, which `cli.py` names and orders: one module for each group.

- `up.py`: trains on this machine alone
- `machines.py`: `bootstrap` (its work is in `bootstrapping.py`), `node` and `doctor`
- `looking.py`: shows a run that is under way; `operating.py`: what its operator does
- `saves.py`: what to do with the saves that a run left
- `data.py`, `models.py`: what goes in and what comes out
- `terminal.py`: results and errors; `registry.py`: how to ask a registry

The fields of dataclasses are the options: those of several commands are in `launch/options.py`.

A command imports what it needs inside its function, so that --help is quick.
"""
