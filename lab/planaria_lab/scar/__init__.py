"""SCAR's experiments on convex problems.

convex.py is for its bound, partial.py for partial recovery; results.py makes records, tables and
plots, command.py is `planaria lab scar`.
"""
