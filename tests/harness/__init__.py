"""What tests of several rooms share.

- `network.py`: nodes with one virtual clock, and what they send each other
- `reducing.py`: replicas of a stage in such a network, which sum gradients
- `at_rest.py`: counters that must be back at zero
- `ports.py`: a free port
- `wire.py`: a TCP relay that keeps what passes, and can break
- `rules.py`: rules of a transaction
- `processors.py`: what a script prints with the kernels of another processor
"""
