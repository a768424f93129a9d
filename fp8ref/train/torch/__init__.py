"""The PyTorch trainer: ``trainer.Trainer`` trains a Llama on one device, or as one process of
several.
"""
