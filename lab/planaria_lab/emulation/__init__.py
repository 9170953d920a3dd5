"""Live swarms behind emulated links.

links.py says when a packet arrives, relay.py carries packets by it between network namespaces,
emulation.py sets these up. live_swarm.py trains there, with paced_node.py on processors that are
emulated, too, live_study.py compares policies, and live.py is `planaria lab live`.
"""
