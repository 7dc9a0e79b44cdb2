"""Prompts and rewards: what a task is, the ones that ship, adapters for the rest, and scoring in worker processes. Imports no torch."""
