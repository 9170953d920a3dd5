"""The commands of `planaria`, which cli.py names and orders: one module for each group of them.

up.py trains on this machine alone; machines.py has `bootstrap`, of which bootstrapping.py is the
work, `node` and `doctor`; looking.py what shows a run that is under way, operating.py what its
operator does, saves.py what is done with what one has left; data.py and models.py what goes in and
what comes out. They share options.py (options, and what may be their values), terminal.py (how
results and errors are said) and registry.py (how a registry is asked). What a command needs is
imported inside it, so that --help is quick.
"""
