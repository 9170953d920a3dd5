"""What a node keeps for the day when a stage is lost, and how a newcomer gets its state.

Read stage_state.py first: a stage's state, and which one it is. holdings.py is all that a node
keeps: copies.py (stage 0 and running snapshots, at peers), twin.py (redundant computation),
saves.py (files) and boundary.py (what crossed between stages). A newcomer has rebuild.py (by the
method that the driver has chosen), transfer.py (exact state from peers), feeding.py (what it is
sent while it follows), relearn.py (training what was guessed) and homework.py (what of that is left
when training goes on). taken.py is what is kept for
those who take the model home while it is trained. handover.py says whether who is told to go can
give its state to an heir in time; regroup.py writes a run's saves anew for other stages.
"""
