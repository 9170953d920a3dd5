"""A stage at work.

compute.py is the one thread that computes, watch.py says when it hangs. arithmetic.py is all that
an agent asks of a stage: work.py makes frames of frames, a microbatch's passes, and lesson.py
relearns; device.py says how large and fast the device is, activations.py what a microbatch takes of
it, and room.py how many there may be at a time. What is computed: shape.py (how large, without
torch), model.py (the blocks), subspace.py (so that little crosses between them), crossing.py (what
does), architecture.py (what one of a run's own is), own_code.py (loads it), lora.py (adapters,
which may be all that is trained of it), initial.py (first weights), random_state.py (layers draw
from it), optimizer.py (AdamW over one flat view) and learning_rate.py.
"""
