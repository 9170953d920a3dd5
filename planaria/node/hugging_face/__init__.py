"""Models as transformers reads and writes them.

Into a run: `begin_from_model.py`, a run that begins from a model. The files are read in `model/`.

Out of it:

- `export.py`: a folder of a run's weights; `card.py` writes its page, `push.py` uploads it
- `adapters.py`: a run's adapters, or weights with the adapters merged
- `from_saves.py`: the weights from a run's saves
- `living_run.py`, `from_swarm.py`: the weights from the nodes of a run that is training

Computing with it:

- `whole_model.py`: the whole model in one process; `through_swarm.py`: through the nodes
- `generate.py`: text; `dialogue.py`: answers; `evaluate.py`: losses
- `samples.py`: text that nodes generate while they train

`options.py` has the options of exports and evaluations.
"""
