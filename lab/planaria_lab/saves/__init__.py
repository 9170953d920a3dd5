"""What saves cost a live swarm, blocking and overlapped, after ECRL's matrix.

saving_node.py is `planaria node` whose saves are timed, and can be made blocking or its storage
slow; swarm.py trains such nodes, kills all and resumes, and says where the time went; study.py has
the matrix, and makes table and plot of its rows; command.py is `planaria lab saves`.
"""
