"""What losses cost in learning: studies of many runs, each in one process."""
