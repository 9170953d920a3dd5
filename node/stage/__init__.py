"""A stage at work.

compute.py is the one thread that computes, watch.py says when it hangs. arithmetic.py is all that
an agent asks of a stage: work.py makes frames of frames, a microbatch's passes, and lesson.py
relearns. What is computed: shape.py (how large, without torch), model.py (the blocks), initial.py
(their first weights), optimizer.py (AdamW over one flat view) and learning_rate.py; next_stage.py
is what a twin computes of the stage behind the node's own.
"""
