"""How long a test waits for what must come: far longer than it takes, for a machine whose cores others use."""

PATIENCE = 600.0  # seconds
