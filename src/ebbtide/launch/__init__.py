"""Starts the ranks of a run: on this machine, or over Ray."""
