"""The step transaction: who does what for a step, and whether it is committed.

State machines without clock, socket or tensor; docs/protocol.md specifies them. Read
effects.py first (what they ask for), then member.py (every node) and driver.py (one node of stage
0). What a driver is at is gathering.py, syncing.py, attempting.py or resting.py, with joining.py
beside it; rules.py is what the run file says to it, bounds.py what no message can say, proving.py
what no member can have, blaming.py whose fault it is that attempts fail, diverging.py which of a
stage's replicas is wrong when they differ, and doubting.py what becomes of those. checking.py has
visits done twice, to see whether nodes compute what they should. attempt.py is one attempt at a
node: which microbatches come, wait, go on and are sent again, filling.py how many a source has out
at a time; doubles.py is what it does for those checks. standing_out.py finds replicas whose
gradients are unlike the others', routing.py plans which node serves which microbatch, telling.py is
what each member is told of it, overdue.py finds who holds up an attempt, hanging.py what becomes of
who hangs, leaving.py how long who is told to go waits for an heir, takeover.py what an attempt
waits for whose stage has lost its last node. voting.py is what members sign when they are ready,
and what is found in the votes for a commit, chain.py is what a driver signs of a commit,
comparing.py how replicas find out that they have heard of the same, and noting.py who of them is
told what became of each microbatch. following.py is a joiner that copies while the others train,
averaging.py sums the gradients of replicas, held_back.py has what its codecs leave out, scales.py
is by what a commit multiplies them, and tally.py counts what a stage relearns beside them.
"""
