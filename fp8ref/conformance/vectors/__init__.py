"""Test vectors as text, for programs in any language, after Berkeley's TestFloat.

    fp8ref vectors gen cast --format e4m3fn | ./yours | fp8ref vectors verify cast

A line is a vector: fields separated by blanks. ``gen`` writes the inputs. The tested program writes
each line again and appends its answers. ``verify`` judges them. A field is one number, or several
with commas, the last axis fastest. Numbers are hexadecimal, most significant first; shapes decimal.

    operation   inputs                                              answers
    cast        value                                               code
    scale       amax (float32)                                      scale (float32), scale_inv, or
                the e8m0 code
    quantize    shape, values                                       codes, scales (float32), their
                inverses, or e8m0 codes
    gemm        M,N,K, codes of a [M, K], scale_inv of a (float32),  values [M, N], of the output
                dtype codes of b [N, K], scale_inv of b
    attention   B,H,Hkv,Tq,Tk,D, q, k, v (bfloat16)                 o and lse (float32); - without
                lse

Lines that begin with # are comments, which a program may copy or drop. The first is a header: a
version, an operation, and settings as key=value. ``verify`` refuses answers under another header:

    # fp8ref vectors 1: cast format=e4m3fn source=float32 seed=0 count=10000

``verify`` makes the same vectors again, from the header, or from the options of ``gen`` if the
header was dropped. Each vector must come once, in any order. Missing, unasked and repeated ones
fail and are reported by their lines, unless --some is given. A first UTF-8 mark, CRLF and blanks
around a line are ignored. Any other deviation is an error that gives the number of the line.
"""
