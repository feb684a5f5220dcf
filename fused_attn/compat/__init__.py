"""Other packages' functions on the kernels of this one, under their names and signatures."""
