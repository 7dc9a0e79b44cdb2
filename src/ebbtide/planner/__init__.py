"""Says before a run what it will take: bytes by phase and holding, seconds by phase, and the settings that fit a budget. Imports no torch."""
