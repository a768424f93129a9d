"""Weights in Hugging Face's format, to and from the trainer's model."""
