"""Text to tokens, tokens to samples, samples to steps.

documents.py reads texts and conversations from files, which lie where places.py finds them;
messages.py puts conversations into one form, chat.py makes texts of them, in the process that
rendering.py begins; tokenizer.py finds the tokens that bound a text. prepare.py makes a folder of
tokens by a recipe.py, whose fields are in options.py, once: each file's are a part (parts.py),
written as shards.py does, in this process or in others (spread.py). corpus.py reads that folder,
or, where that stands for one elsewhere, blocks of it (blocks.py), as elsewhere.py does; mixture.py
makes one of several.
windows.py says which samples a step trains on, and turns.py which of them are of which corpus.
"""
