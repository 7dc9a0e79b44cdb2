"""In what pieces attention takes the keys of a sequence (attention_kernels.py), on a GPU. Imports no torch."""

STRIP = 64
"""Keys that enter the online softmax at once."""
SPLIT = 512
"""Keys whose results are merged with those of other splits."""
MOST_SPLITS = 32
"""Contexts longer than so many splits have larger ones in decode, and other bits than in training."""
