"""Helpers that know nothing of training: files, JSON, printable text, signals, units, the rates of machines, and the
private parts of torch and transformers."""
