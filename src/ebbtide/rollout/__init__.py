"""Sampling completions: the engine's interface, prompts, and the engine on transformers' `generate`."""
