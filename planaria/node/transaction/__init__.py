"""The step transaction: who does what for a step, and whether it is committed.

State machines without clock, socket or tensor; docs/protocol.md specifies them.

- `effects.py`: what the machines ask for; `bounds.py`: limits of every message; `rules.py`: what
  the run file sets
- `member.py`: every node's side
- `driver.py`: the driver's side. Its phases: `gathering.py`, `syncing.py`, `attempting.py`,
  `resting.py`; beside them `joining.py`

One attempt:

- `routing.py`: plans a node for each visit; `plan_encoding.py`: each member's part of the plan
- `attempt.py`: a node's microbatches; `in_flight_window.py`: how many a source has out
- `averaging.py`: sums the gradients of replicas; `error_feedback.py`: what its codec left out;
  `scales.py`: factors of a commit
- `record_replication.py`: who keeps the records of a step
- `relearning_progress.py`: updates of stages that relearn meanwhile
- `following.py`: a joiner that copies while others train
- `leaving.py`: a member that must leave; `takeover.py`: a stage whose last node is gone

Faults:

- `stragglers.py`: who delays an attempt; `hang_detection.py`: whose device hangs
- `fault_attribution.py`: whose fault failed attempts are
- `status_validation.py`: what a member can't have
- `divergence_detection.py`: which replica differs; `divergence_repair.py`: what happens to it
- `spot_checks.py`: visits computed twice; `double_visits.py`: a node's side of them
- `gradient_outliers.py`: replicas whose gradients are unlike the others'
"""
