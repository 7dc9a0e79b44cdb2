"""The algorithms: one file each that says what a step is, and the loop that does the steps (loop.py)."""
