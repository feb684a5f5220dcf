"""Commands of `fused-attn`: each module declares its arguments and runs."""
