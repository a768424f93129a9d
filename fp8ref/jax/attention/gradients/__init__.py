"""The backward pass of attention: in FP8, of MX blocks, in bfloat16."""
