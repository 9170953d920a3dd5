"""The driver's side of the step transaction: what is begun, who takes part, what is committed.

State machines without clock, socket or tensor; docs/protocol.md specifies them.

- `driver.py`: view, phase and what outlives a phase; `phases.py`: what all phases have in common
- `gathering.py`: queries all members; `query_answers.py`: what they have
- `syncing.py`: waits for state; `rebuilds.py`: who fetches which state from where
- `attempting.py`: an attempt at a step; `attempt_state.py`: its plan, with lost nodes and without,
  what is done, the votes;
  `takeover.py`: a stage whose last node is gone; `skipping.py`: steps without an update
- `joiners.py`: members that copy their state meanwhile; `records.py`: who keeps a step's records

Faults:

- `fault_policy.py`: whose fault failures are, and what that costs
- `hangs.py`: who delays an attempt, and whose device hangs
- `status_validation.py`: what a member can't have
- `divergence.py`: which replica differs, and what happens to it
- `spot_checks.py`: visits computed twice; `audits.py`: sums of gradients, examined again
"""
