"""A node's part in the step transaction: what it computes, and when it votes and applies commits.

State machines without clock, socket or tensor; docs/protocol.md specifies them. The driver's side
is in the room `driver/`.

- `effects.py`: what the machines ask for; `bounds.py`: limits of every message; `rules.py`: what
  the run file sets
- `member.py`: every node's side; `following.py`: a joiner that copies while others train
- `commits.py`: what a commit says to a stage
- `routing.py`: plans a node for each visit; `plan_encoding.py`: each member's part of the plan
- `attempt.py`: a node's microbatches; `in_flight_window.py`: how many a source has out;
  `double_visits.py`: those that two nodes compute
- `relearning_progress.py`: updates of stages that relearn meanwhile
- `leaving.py`: a member that must leave
"""
