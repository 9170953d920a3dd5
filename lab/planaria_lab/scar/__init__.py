"""SCAR's experiments on convex problems.

convex.py tests its bound, partial.py its partial recovery. results.py makes records, tables and
plots. command.py is `planaria lab scar`.
"""
