"""Test vectors as text, for programs in any language, as Berkeley's testfloat_gen and testfloat_ver are for IEEE arithmetic.

    fp8ref vectors gen cast --format e4m3fn | ./yours | fp8ref vectors verify cast

A line is a vector: fields, separated by blanks. ``gen`` writes the inputs; whoever is tested writes each line again with its
answers behind, and ``verify`` judges those. A field is one number or several, separated by commas, the last axis fastest. Numbers are
bits in hexadecimal, most significant first; a shape is decimal.

    operation   inputs                                              answers
    cast        value                                               code
    scale       amax (float32)                                      scale (float32), scale_inv, or the e8m0 code
    quantize    shape, values                                       codes, scales (float32), their inverses, or e8m0 codes
    gemm        M,N,K, codes of a [M, K], scale_inv of a (float32),  values [M, N], of the output dtype
                codes of b [N, K], scale_inv of b

Lines that begin with # are comments, and may be copied or dropped. The first is a header: what is asked, so that ``verify`` judges no
answer to another question. It is a version, an operation, and key=value:

    # fp8ref vectors 1: cast format=e4m3fn source=float32 seed=0 count=10000

From the header, or from the options of ``gen`` where it was dropped, ``verify`` makes the same vectors again: each is to come once, in any
order, and those that are missing, unasked or repeated are named by their lines and fail, unless --some is given. A first UTF-8 mark, CRLF and
blanks about a line mean nothing. Input that does not have this form is an error, with its line's number.
"""
