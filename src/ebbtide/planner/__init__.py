"""Predicts before a run what it will take: bytes by phase and holding, seconds by phase, and the settings that fit a
budget. All but run_plan.py and host_memory.py, which look at this machine, import no torch."""
