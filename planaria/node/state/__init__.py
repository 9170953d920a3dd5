"""What a node keeps in case a stage is lost, and how a newcomer gets its state.

- `stage_state.py`: a stage's state and its identity
- `holdings.py`: all that a node keeps: `copies.py` (stage 0 and running snapshots, at peers),
  `twin.py` (redundant computation), `saves.py` (files; `save_file.py` is one, `saves_on_disk.py`
  writes them beside training), `boundary.py` (tensors between stages)
- `rebuild.py`: a newcomer's side: `transfer.py` (exact state from peers), `feeding.py` (while it
  follows), `relearn.py` (training of a guess), `background_relearning.py` (the rest of that, while
  the run trains)
- `observing.py`: service for observers; `weight_pins.py`: weights of a step that an export reads
- `reducing.py`: the sum of a stage's gradient, and the vote
- `own_saves.py`: what is on disk of a seat's own state; `serving.py`: states for other nodes
- `regrouped_saves.py`: saves rewritten for other numbers of stages
"""
