"""A stage at work: its model, its optimizer, and the microbatches that go through it."""
