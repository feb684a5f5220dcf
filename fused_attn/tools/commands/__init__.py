"""Commands of `fused-attn`; each module declares the arguments of a command and runs it."""
