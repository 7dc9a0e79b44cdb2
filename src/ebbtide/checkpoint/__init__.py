"""Checkpoints: written whole or not at all, verified before they are trusted, and enough to resume to the bit."""
