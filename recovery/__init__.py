"""What to do about loss: pure functions on tensors and facts, without I/O."""
