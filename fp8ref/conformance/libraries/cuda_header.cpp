// Casts of CUDA's own header cuda_fp8.hpp on the host, for arrays. Compiled by cuda_header.py.
#include <cuda_fp8.h>

#include <cstdint>
#include <cstring>

template <class Raw, class Cast>
static void each(const uint16_t *from, uint8_t *to, int64_t count, Cast cast) {
  for (int64_t i = 0; i < count; i++) {
    Raw raw;
    std::memcpy(&raw, from + i, sizeof raw);
    to[i] = cast(raw);
  }
}

// source: 0 float32, 1 bfloat16, 2 float16; format: 0 e4m3fn, 1 e5m2.
extern "C" void fp8ref_cast(const void *from, uint8_t *to, int64_t count, int source, int format, int saturate) {
  const auto kind = format ? __NV_E5M2 : __NV_E4M3;
  const auto limit = saturate ? __NV_SATFINITE : __NV_NOSAT;
  if (source == 0)
    for (int64_t i = 0; i < count; i++) to[i] = __nv_cvt_float_to_fp8(static_cast<const float *>(from)[i], limit, kind);
  else if (source == 1)
    each<__nv_bfloat16_raw>(static_cast<const uint16_t *>(from), to, count,
                            [=](__nv_bfloat16_raw x) { return __nv_cvt_bfloat16raw_to_fp8(x, limit, kind); });
  else
    each<__half_raw>(static_cast<const uint16_t *>(from), to, count, [=](__half_raw x) { return __nv_cvt_halfraw_to_fp8(x, limit, kind); });
}

// float16 bits of FP8 codes.
extern "C" void fp8ref_decode(const uint8_t *from, uint16_t *to, int64_t count, int format) {
  for (int64_t i = 0; i < count; i++) {
    const __half_raw raw = __nv_cvt_fp8_to_halfraw(from[i], format ? __NV_E5M2 : __NV_E4M3);
    std::memcpy(to + i, &raw, sizeof raw);
  }
}

// e8m0 codes of float32 numbers, rounded up (cudaRoundPosInf) or toward zero.
extern "C" void fp8ref_e8m0(const float *from, uint8_t *to, int64_t count, int up, int saturate) {
  for (int64_t i = 0; i < count; i++)
    to[i] = __nv_cvt_float_to_e8m0(from[i], saturate ? __NV_SATFINITE : __NV_NOSAT, up ? cudaRoundPosInf : cudaRoundZero);
}
