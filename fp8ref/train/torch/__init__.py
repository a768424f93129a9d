"""The PyTorch trainer: ``trainer.Trainer``, on one device or as one process of several."""
