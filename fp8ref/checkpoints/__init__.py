"""Checkpoints with weights in FP8, MXFP8 or NVFP4: what their bytes are, and by which rule.

``tensors`` reads safetensors piece by piece, ``weights`` says which tensors hold the codes and
the scales of a weight, ``rule`` states how a library quantizes one.
"""
