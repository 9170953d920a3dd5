"""The node daemon, and the command `planaria`.

Beside the rooms is what is the process itself: cli.py (the command, whose parts are in `commands`),
run_file.py and resolve.py (the job), extras.py (libraries that may be missing), imports.py (where
other Pythons look for modules), secret_words.py (secrets among a command's words), supervisor.py
(starts a node, and another when it crashes), node_options.py and begin.py (what a node was asked
for), own_folders.py (where it reads and writes), serve.py (a process that joins, and joins again),
advertised.py (where peers dial it), notices.py (what clouds say of the end of a machine),
instance.py (its key, over all its identities), enrolled.py (how it comes by an invite), daemon.py
(one identity: joining, links, and an agent for each seat), doctor.py and diagnosis.py (whether a
node could join: what is found, and what that means), seats.py (who of its seats hears what),
naming.py (how seats are called), cores.py (how many processors there are), agent.py (a seat at a
stage: all that a node does there, without loop, clock, socket, thread or tensor) and ports.py (what
an agent asks of the world).

Read the rooms in this order: `transaction` decides, `stage` computes, `wire` carries, `state` keeps
and restores, `data` feeds, `report` tells, `page` shows it in a browser, `hugging_face` hands the
model out, and `local` starts all of it on one machine.
"""
