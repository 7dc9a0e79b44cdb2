"""What a run shows and writes: the terminal, the run folder, TensorBoard and Weights & Biases."""
