"""What blocking and overlapped saves cost a live swarm, by ECRL's matrix of measurements.

saving_node.py is `planaria node` with timed saves, which can be made blocking or slow. swarm.py
trains a swarm of such nodes, kills and resumes it, and divides its time into parts. study.py has
the matrix, and makes table and plot of its rows. command.py is `planaria lab saves`.
"""
