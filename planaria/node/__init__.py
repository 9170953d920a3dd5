"""The node daemon, and the command `planaria`.

Beside the rooms, from the top down:

- `cli.py`: the command; its subcommands are in `commands/`
- `serve.py`: a process that joins a run, and joins again after its node was dropped
- `node.py`: one identity: it joins, keeps links, and makes an agent for each seat
- `daemon.py`: what that has of its process: the compute thread, files, the device
- `seats.py`: the seats of a node, and which of them gets a message
- `agent.py`: a seat at a stage: all that a node does there, without clock, socket or tensor
- `ports.py`: what an agent asks of the world
- `run_file.py`: the run file

A room imports only the rooms after it (`make lint` checks that):

- `commands/`: the subcommands
- `local/`: a whole swarm on one machine
- `launch/`: all that comes before a node joins
- `page/`: the run in a browser, for Prometheus, and in a terminal
- `hugging_face/`: models in the format of transformers, into a run and out of it
- `stage/`: computes
- `state/`: keeps what a loss may need, and restores it
- `driver/`: plans and decides each step, at one node of stage 0
- `averaging/`: sums the gradients of replicas, and audits the sums
- `transaction/`: each node's part in a step
- `report/`: events, ledger, summary
- `wire/`: carries
- `model/`: the model: shapes, layers, files
- `data/`: text to tokens, tokens to samples
- `machine/`: processes, devices, the compute thread
"""
