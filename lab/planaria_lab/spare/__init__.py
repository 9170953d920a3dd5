"""SPARe: how many losses its masking endures, and what it costs.

golomb.py places shards, masking.py reorders them after a loss. endurance.py has closed forms,
events.py simulates training event by event, published.py has the paper's figures. tables.py and
figures.py compare them, plots.py draws, and command.py is `planaria lab spare`.
"""
