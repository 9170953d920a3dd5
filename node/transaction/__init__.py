"""The step transaction: who does what for a step, and whether it is committed."""
