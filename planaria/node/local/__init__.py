"""A whole swarm on this machine: `planaria up`.

swarm.py starts, kills, restarts and sums up; resume.py finds what a run has saved, and writes it
anew for a run that goes on in other numbers; losses.py says who is lost when, processes.py has the
processes, and fork_server.py is loaded into the one that they are forked from. from_python.py is
the same for programs and notebooks: `planaria.load`, `planaria.up`.
"""
