"""What to rent, and how to run it: `planaria plan`."""
