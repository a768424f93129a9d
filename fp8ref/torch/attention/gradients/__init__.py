"""The backward pass of attention: fast, stated, of MX blocks, in bfloat16."""
