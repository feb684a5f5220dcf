"""The command line `fused-attn` and its tools."""
