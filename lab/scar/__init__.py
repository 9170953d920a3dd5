"""SCAR's experiments on convex problems."""
