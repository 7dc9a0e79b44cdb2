"""More than one rank: their start, what they say to each other, and how they share out a model."""
