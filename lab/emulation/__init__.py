"""Live swarms behind emulated links."""
