"""The optimizer, its backends (device, streamed, CPU) and the learning rate schedule."""
