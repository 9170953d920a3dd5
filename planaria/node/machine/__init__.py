"""What planaria uses of the machine that it runs on.

- `processes.py`: child processes that end with their parent
- `imports.py`: where child processes look for modules
- `cores.py`: how many processors and how much memory this process may use
- `extras.py`: libraries that may be missing, and how to get them
- `device.py`: the torch device: its memory and its speed
- `compute.py`: the one thread that computes; `hang_watch.py` says when it hangs
"""
