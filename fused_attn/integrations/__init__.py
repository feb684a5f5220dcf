"""Glue to libraries that have their own way of calling attention; imported only on demand."""
