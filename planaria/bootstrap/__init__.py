"""The registry: it knows who serves what, in numbered views. Nothing in here imports torch.

Decisions, pure:

- `membership.py`: the state machine: events in, effects out (`effects.py`), by the run's `rules.py`
- `member_table.py`: the table of members with its indexes
- `joining.py`: who may join, and at which stage; `quarantine.py`: nodes evicted for cause
- `operator_orders.py`: pause, go, change, back and stop, by the run's operator
- `leases.py`: who is silent; `isolation.py`: when all are, for this registry
- `unreachable_pairs.py`: members that can't reach each other; `accusations.py`: what members report
  of others
- `placement.py`: which of the `candidates.py` gets a vacant seat; `failure_domains.py`: where nodes
  are; `awaited_saves.py`: which lost nodes may come back with a save
- `rebalancing.py`: which seats move, so that steps become shorter; `step_time.py`: how long a step
  will take
- `next_driver.py`: which node drives; `commit_watermark.py`: how far the run has come
- `neighbours.py`: which nodes keep links with each other; `history.py`: what has happened

The service:

- `service.py`: calls and streams around the machine; `broadcast.py`: what all members get;
  `reply_budget.py`: memory for answers to joins; `truncation.py`: what fits into a message
- `journal.py`: views on disk; `store.py`, `etcd.py`: views that several registries share, of which
  `leader_election.py` has one lead
- `address_probe.py`: whether an address answers; `stop_signals.py`: signals that end a process
- `connection_limits.py`: how many connections gRPC accepts, and for how long without a handshake

Who may do what:

- `identity.py`: keys and signatures; `views.py`: signed views
- `authority.py`: certificates; `invites.py`: invites; `admission.py`: which invites are valid
- `enrolment.py`, `registry_enrolment.py`: the registry's side of enrolment; `enrolment_client.py`:
  the node's, which also renews its certificate
- `credentials.py`: TLS; `authorization.py`: rights of a caller, and how its calls are encoded

Both sides:

- `transport.py`: the port to the network; `grpc_transport.py`: over gRPC,
  with liveness checks
- `client.py`: a node's client; `address.py`: HOST:PORT; `escaping.py`: names and text of others
- `files.py`: reading and writing them
"""
