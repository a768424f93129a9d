"""The trainer's Llama in JAX (spec M), its loss, its experts, its stacks of layers."""
