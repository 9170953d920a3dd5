"""Averaging: replicas of a stage sum their gradients, and the driver audits the sums.

- `coding.py`: how parts of a gradient travel; `error_feedback.py`: what the codec left out
- `reduction.py`: the sum at one replica: frames in, frames out; `averaging.py`: its exchange
- `evidence.py`: signed digests of what a replica sends, and its answer to an audit
- `examination.py`: examines the answers, at the driver
- `outliers.py`: sequential tests of replicas whose gradients are unlike the others'
"""
