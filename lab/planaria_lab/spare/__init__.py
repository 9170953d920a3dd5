"""SPARe: what masking losses endures and costs.

golomb.py places shards, masking.py reorders them after a loss. endurance.py has closed forms,
events.py trains event by event, published.py has what its authors printed; tables.py and figures.py
compare, plots.py draws, and command.py is `planaria lab spare`.
"""
