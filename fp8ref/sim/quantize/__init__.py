"""Amax, scale, codes and back (spec C, S).

cast        round to a format
scales      amax -> scale, by a policy
scaling     tensor -> amax, scale, codes; dequantize
two_level   scales of blocks under a scale of the tensor (NVFP4)
packing     two codes of 4 bits in a byte
stats       what quantizing cost
"""
