"""Text to tokens, tokens to samples, samples to steps.

Text to tokens:

- `file_access.py`: where files are; `documents.py`: their texts and conversations
- `messages.py`: conversations in one form, and which messages are scored; `chat.py`: their text, by
  the model's template, which `template_process.py` runs in a process of its own, and which part is
  scored
- `tokenizer.py`: the tokens that begin and end a text
- `prepare.py`: writes a folder of tokens by a `recipe.py`, which has the fields of `options.py`, in
  parts (`parts.py`, with which tokens are scored; `shard_writers.py`), in this process or in others
  (`executors.py`); `progress.py` shows how far it is

Tokens to samples:

- `corpus.py`: reads that folder; `remote_corpus.py`: from another machine, in blocks (`blocks.py`)
- `mixture.py`: several corpora as one
- `windows.py`: which samples a step trains on; `mixture_cycle.py`: from which corpus each is;
  `batches.py`: how many, where a run's batch was changed
"""
