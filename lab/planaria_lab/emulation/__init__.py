"""Live swarms behind emulated links.

links.py computes when a packet arrives. relay.py carries packets between network namespaces at
these times, and emulation.py sets the namespaces up. live_swarm.py trains a swarm in them;
paced_node.py emulates processors, too. live_study.py compares policies, and live.py is the command
`planaria lab live`.
"""
