"""Text to tokens, tokens to samples, samples to steps.

documents.py reads texts, prepare.py makes a folder of tokens of them, once, and corpus.py reads
that folder; windows.py says which samples a step trains on.
"""
