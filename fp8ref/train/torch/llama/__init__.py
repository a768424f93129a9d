"""The trainer's Llama in PyTorch (spec M), its loss and its experts."""
