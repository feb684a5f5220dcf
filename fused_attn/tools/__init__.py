"""What `fused-attn` runs: the command line and its tools."""
