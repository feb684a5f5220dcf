"""Attention and norm calls as objects: their validation, packed sequences, KV caches and counts."""
