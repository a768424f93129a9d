"""Inputs that distinguish casts, scales and quantizers, and the kinds that each input belongs to.

``cast_inputs``       inputs of casts: every number and tie of a format with their neighbors,
                      specials, random values.
``quantizer_inputs``  inputs of scales and quantizers: amaxes, tensors whose groups have them, and
                      tensors by a named pattern.
``kinds``             the kind of a single input of a cast or of a scale, with the clause that
                      decides it.
``dtypes``            the dtypes that inputs have, as bits and as values.
"""
