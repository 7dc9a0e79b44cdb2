"""Which tensors live where in each phase, how they move, and what that costs. It knows tensors, not language models."""
