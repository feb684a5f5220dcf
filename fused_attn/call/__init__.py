"""Attention and norm calls as values: validation, packed sequences, shards of global calls."""
