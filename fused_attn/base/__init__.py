"""Helpers for torch state, flattening, layouts, shapes and Philox.

They import nothing from the rest of fused_attn.
"""
