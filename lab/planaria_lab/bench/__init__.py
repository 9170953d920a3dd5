"""Benchmarks. Each prints ratios of its figures to those of a reference measured in the same run.

rows.py writes the figures to the folder FOLDER of `OUT=FOLDER make bench`. stage.py and codecs.py
run on any device; gpu.py, beside this folder, calls them.
"""
