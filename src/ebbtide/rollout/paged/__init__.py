"""An engine inside the process: it decodes with the very tensors that are trained, in a paged cache of keys and values."""
