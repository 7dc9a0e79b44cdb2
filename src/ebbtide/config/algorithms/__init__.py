"""The settings of each algorithm: one file, with a class `Root`, for each file of the room algorithms/."""
