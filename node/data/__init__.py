"""Text to tokens, tokens to samples, samples to steps.

documents.py reads texts and conversations, which chat.py makes texts of, in the process that
rendering.py begins; prepare.py makes a folder of tokens of them, once, and corpus.py reads that
folder; mixture.py makes one of several.
windows.py says which samples a step trains on, and turns.py which of them are of which corpus.
"""
