/* A cast of float32 to e4m3fn in integers, as a program that answers test vectors:

     cc -O2 -o cast_e4m3fn examples/cast_e4m3fn.c
     fp8ref vectors gen cast --format e4m3fn | ./cast_e4m3fn | fp8ref vectors verify cast --format e4m3fn

   With -DTIES_AWAY, -DNO_SUBNORMALS or -DUNSIGNED it is wrong, and verify says how. */
#include <inttypes.h>
#include <stdio.h>

static unsigned encode(uint32_t bits) {
    uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7FFFFFFF, exponent = magnitude >> 23;
#ifdef UNSIGNED
    sign = 0;
#endif
    if (magnitude > 0x7F800000) return 0x7F;                        /* NaN */
    uint32_t significand = (magnitude & 0x7FFFFF) | 0x800000;       /* where exponent is 0 it underflows anyway */
    uint32_t shift = exponent >= 121 ? 20 : 141 - exponent;         /* 121 is that of 2^-6, the smallest normal number */
    if (shift > 25) return sign;                                    /* below half of the smallest subnormal */
    uint32_t n = significand >> shift, rest = significand & ((1u << shift) - 1), half = 1u << (shift - 1);
#ifdef TIES_AWAY
    n += rest >= half;
#else
    n += rest > half || (rest == half && (n & 1));
#endif
    uint32_t code = exponent > 121 ? n + 8 * (exponent - 121) : n;  /* a carry out of n is right by itself */
#ifdef NO_SUBNORMALS
    if (code < 8) code = 0;
#endif
    return sign | (code > 0x7E ? 0x7E : code);                      /* saturates, infinities too */
}

int main(void) {
    char line[256];
    uint32_t bits;
    while (fgets(line, sizeof line, stdin))
        if (line[0] == '#') fputs(line, stdout);
        else if (sscanf(line, "%" SCNx32, &bits) == 1) printf("%08" PRIX32 " %02X\n", bits, encode(bits));
    return 0;
}
