"""The driver's side of the step transaction: what is begun, who takes part, what is committed.

State machines without clock, socket or tensor; docs/protocol.md specifies them.

- `driver.py`: the state machine. Its phases: `gathering.py`, `syncing.py`, `attempting.py`,
  `phases.py`
- `joining.py`: members that copy their state meanwhile; `takeover.py`: a stage whose last node is
  gone; `records.py`: who keeps the records of a step

Faults:

- `fault_policy.py`: whose fault failed attempts are
- `hangs.py`: who delays an attempt, and whose device hangs
- `status_validation.py`: what a member can't have
- `divergence.py`: which replica differs, and what happens to it
- `spot_checks.py`: visits computed twice
"""
