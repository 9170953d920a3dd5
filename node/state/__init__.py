"""What a node keeps for the day that a stage is lost, and how a newcomer gets its state."""
