"""The JAX trainer: ``trainer.Trainer`` holds a Llama on a mesh and takes its training steps."""
