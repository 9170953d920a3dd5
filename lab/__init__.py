"""Experiments around the daemon: what a loss costs, and what links do to a swarm."""
