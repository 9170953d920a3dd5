"""The model: shapes, layers, files.

- `shape.py`: sizes of a model and the shapes of its tensors, without torch
- `modules.py`: the stages as torch modules; `random_state.py`: the generator of their first weights
- `subspace.py`: boundaries of a few dimensions
- `lora.py`: adapters; `quantized.py`: frozen matrices of fewer bits;
  `dequantized.py`: checkpoints that have some
- `architecture.py`: what an architecture of a run's own provides
- `decoder.py`: stages of transformers' code; `decoder_trial.py`: whether these compute what the
  whole does
- `learning_rate.py`: the schedule
- `config.py`: a model's config.json; `layout.py`: which tensors are in which stage
- `checkpoint.py`: a folder of transformers, read tensor by tensor
"""
