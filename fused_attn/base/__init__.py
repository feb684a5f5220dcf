"""Helpers without imports from this package: torch state, flattening, layouts, shapes, Philox."""
