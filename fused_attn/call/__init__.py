"""Calls of attention and norms as values: validation, packed sequences, parts of larger calls."""
