"""Sampling completions: the engine's interface, prompts, the paged engine, those on transformers' `generate` and on vLLM, and the HTTP server."""
