"""Rollouts: the engine interface, prompts, the paged engine, the engines on transformers' `generate` and on vLLM, the
weights they generate with, and the HTTP server."""
