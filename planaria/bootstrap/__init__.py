"""The registry: who serves what, in numbered views. Nothing in here imports torch.

Read membership.py first, the machine that decides; seating.py has its part about who takes a seat
that nobody has, places.py what it knows of where they are, neighbours.py who of them keeps links
with whom, cuts.py that about members that can't reach each other, words.py that about what members
say of each other, quarantine.py that about those evicted for cause, progress.py that about how far
the run has come. service.py is the gRPC around it, answers.py whom that answers first, journal.py
what it has on disk, client.py the node's side. dial.py finds out whether a silent node is there,
knock.py whether anything listens at an address; front_door.py takes connections, doorkeeper.py
looks at those that a node's port has, and crowd.py decides for both who of many strangers stays;
address.py reads HOST:PORT, spelling.py says what others may be called and makes what they say fit
for a terminal, credentials.py says who may talk to whom, identity.py whose word something is,
views.py which views are the registry's, votes.py whether a driver has decided without a member's
vote, fitting.py what a message has room for.

Where several registries share a run, turns.py has one of them lead, store.py is what they write
into instead of a journal, and etcd.py how etcd is spoken to.

allowed.py reads who alone may join, small_files.py any small file that a user names. authority.py
is what certificates say, invites.py who gets one, admission.py both as the registry keeps them, in
files as secret_files.py writes them. gate.py says who may call what, enrolment.py are the services
that let strangers in and obey operators, admitting.py what a registry does with them when it
begins, enrolling.py a stranger's side.
"""
