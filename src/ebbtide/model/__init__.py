"""Models: their shape and number of parameters (without torch), loading them, their tokenizers."""
