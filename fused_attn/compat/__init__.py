"""Functions with the names and signatures of other packages, on the kernels of this package."""
