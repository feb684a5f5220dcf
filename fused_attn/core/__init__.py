"""The way of a call from the public functions to a kernel."""
