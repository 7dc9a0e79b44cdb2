"""The policy: sequence packing, the chunked log-prob head, losses, what activations are kept, and the training step."""
