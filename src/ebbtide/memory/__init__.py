"""The heart: what lives where, and what it costs. Knows tensors, not language models."""
