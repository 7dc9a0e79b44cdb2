"""Prompts and rewards: the interface of a task, the tasks that ship, adapters for others, and scoring (reward
functions) in worker processes. Imports no torch."""
