"""Measurements: each prints a ratio against a named reference measured in the same run.

rows.py keeps the figures, as `OUT=FOLDER make bench` says. stage.py and codecs.py compute on any
device; gpu.py, beside this folder, runs them.
"""
