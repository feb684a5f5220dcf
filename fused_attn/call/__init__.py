"""Attention and norm calls as objects: their validation, packed sequences, and shards."""
