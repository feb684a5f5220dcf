"""Facts about torch, the flat form of values, layouts, Philox; imports nothing of the package."""
