"""Sampling completions: the engine's interface, prompts, and the engines."""
