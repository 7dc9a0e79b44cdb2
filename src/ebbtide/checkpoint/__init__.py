"""Checkpoints: written whole or not at all, verified before they are trusted, and enough to go on to the bit."""
