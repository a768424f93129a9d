"""The PyTorch trainer: ``trainer.Trainer`` holds a Llama, on one device or as one of several processes, and takes its training steps."""
