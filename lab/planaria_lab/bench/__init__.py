"""Measurements: each prints a ratio against a named reference measured in the same run.

rows.py keeps the figures, as `OUT=FOLDER make bench` says.
"""
