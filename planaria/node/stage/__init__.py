"""A stage at work.

- `torch_stage.py`: all that an agent asks of a stage
- `work.py`: the passes of a microbatch, frames in and frames out
- `lesson.py`: relearning
- `optimizer.py`: AdamW or Muon over one flat view of the weights
- `initial.py`: first weights; `own_code.py` loads an architecture of a run's own
- `activations.py`: memory that a microbatch needs; `memory_limit.py`: how many fit at a time
"""
