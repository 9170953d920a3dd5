"""Swarms in simulated time: what a step takes, and what becomes of a run as nodes come and go."""
