"""The paged engine, inside the training process: it decodes with the very tensors that are trained, over a paged KV
cache."""
