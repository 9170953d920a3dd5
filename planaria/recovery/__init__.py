"""What to do about loss: pure functions of facts and tensors, without I/O.

Read facts.py first: what is left after a loss, and what can be decided. policy.py: the policies,
and what each needs while nothing is lost. decide.py: what is done about a lost stage. orders.py:
which stages stand in for each other. How a stage comes back: checkfree.py (from its neighbours),
snapshot.py (from a peer's memory; snapshot_pace.py: if the link to it is fast enough) and
relearning.py (what was guessed is trained on what crossed its boundaries; learner.py has its
arithmetic, newton_schulz.py the orthogonal matrices of Muon).
identical_arithmetic.py: arithmetic that has the same bits on any device.
"""
