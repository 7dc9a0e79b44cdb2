"""Sampling completions: the engine's interface, prompts, the engine on transformers' `generate`, a paged one, and the HTTP server over that."""
