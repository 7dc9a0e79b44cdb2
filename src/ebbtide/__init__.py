"""Ebbtide: reinforcement-learning post-training in which GPU memory is a planned resource."""

__version__ = "0.1.0"
