"""A whole swarm as processes of this machine: `planaria up`."""
