"""`ebbtide import`: configs of NeMo RL, verl and TRL as Ebbtide's. Files are read as data and never executed."""
