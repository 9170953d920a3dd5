"""What tests of several rooms share.

- `at_rest.py`: counters that must be back at zero
"""
