"""Inputs that distinguish casts, scales and quantizers, and the kinds that each input belongs to.

``cast_inputs``       inputs of casts: numbers, ties, neighbors, specials, random values.
``quantizer_inputs``  inputs of scales and quantizers: amaxes, tensors whose groups have them, and
                      tensors by a named pattern.
``kinds``             the kind of an input of a cast or scale, with the clause that decides.
``dtypes``            the dtypes that inputs have, as bits and as values.
"""
