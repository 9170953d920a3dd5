"""Convergence under failures, simulation and planning: what one wants to know before renting."""
