"""A stage at work.

compute.py is the one thread that computes, work.py what is computed there of microbatches, from
frames to frames. What is computed: shape.py (how large, without torch), model.py (the blocks),
optimizer.py (Adam over one flat view) and learning_rate.py; next_stage.py is what a twin computes
of the stage behind the node's own.
"""
