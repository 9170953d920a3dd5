"""The registry: who serves what, in numbered views."""
