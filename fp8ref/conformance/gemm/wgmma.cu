// One wgmma.mma_async m64n8k32 a tile, FP8 operands and a float32 accumulator: D = A B^T + C, for Hopper (sm_90a).
//
// A [tiles][64][32] and B [tiles][8][32] are FP8 codes, C and D [tiles][64][8] float32, all row-major on the host. Only the instruction computes;
// what is around it moves bytes.
#include <cstdint>
#include <cuda_runtime.h>

constexpr int M = 64, N = 8, K = 32, THREADS = 128;

// Four registers of D a thread; the predicate says whether D's old values are added, which they always are here.
#define WGMMA(A_TYPE, B_TYPE)                                                                                  \
  asm volatile(                                                                                                \
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                               \
      "wgmma.mma_async.sync.aligned.m64n8k32.f32." A_TYPE "." B_TYPE " {%0, %1, %2, %3}, %4, %5, p, 1, 1;\n}\n" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                         \
      : "l"(describe(a, lead, stride)), "l"(describe(b, lead, stride)))

// A matrix in shared memory without swizzling: 8 x 16 byte core matrices of 128 consecutive bytes, `lead` bytes apart along K and `stride`
// bytes apart along rows. Addresses and offsets are in units of 16 bytes.
__device__ uint64_t describe(const uint8_t* matrix, int lead, int stride) {
  const auto units = [](uint64_t bytes) { return (bytes & 0x3FFFF) >> 4; };
  return units(__cvta_generic_to_shared(matrix)) | units(lead) << 16 | units(stride) << 32;
}

__device__ void load(uint8_t* matrix, const uint8_t* rows, int count) {
  for (int i = threadIdx.x; i < count * K; i += THREADS) {
    const int row = i / K, k = i % K;
    matrix[((row / 8) * 2 + k / 16) * 128 + (row % 8) * 16 + k % 16] = rows[i];
  }
}

template <int PAIR>
__global__ void __launch_bounds__(THREADS, 1) multiply(const uint8_t* A, const uint8_t* B, const float* C, float* D, int lead, int stride) {
  __shared__ __align__(128) uint8_t a[M * K];
  __shared__ __align__(128) uint8_t b[N * K];
  const size_t tile = blockIdx.x;
  load(a, A + tile * M * K, M);
  load(b, B + tile * N * K, N);
  // Thread t has rows t / 4 and t / 4 + 8 of its warp's 16, columns 2 (t % 4) and the next.
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
  const size_t at[4] = {tile * M * N + row * N + column, tile * M * N + row * N + column + 1, tile * M * N + (row + 8) * N + column,
                        tile * M * N + (row + 8) * N + column + 1};
  float d[4] = {C[at[0]], C[at[1]], C[at[2]], C[at[3]]};
  // what ordinary stores wrote to shared memory is made visible to the tensor core, then all threads wait for each other
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  __syncthreads();
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
  if (PAIR == 0) WGMMA("e4m3", "e4m3");
  if (PAIR == 1) WGMMA("e4m3", "e5m2");
  if (PAIR == 2) WGMMA("e5m2", "e4m3");
  if (PAIR == 3) WGMMA("e5m2", "e5m2");
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;\n" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])::"memory");
  for (int i = 0; i < 4; i++) D[at[i]] = d[i];
}

static int on_device(int pair, const uint8_t* a, const uint8_t* b, const float* c, float* d, int tiles, int lead, int stride) {
  switch (pair) {
    case 0: multiply<0><<<tiles, THREADS>>>(a, b, c, d, lead, stride); break;
    case 1: multiply<1><<<tiles, THREADS>>>(a, b, c, d, lead, stride); break;
    case 2: multiply<2><<<tiles, THREADS>>>(a, b, c, d, lead, stride); break;
    case 3: multiply<3><<<tiles, THREADS>>>(a, b, c, d, lead, stride); break;
    default: return cudaErrorInvalidValue;
  }
  const cudaError_t launched = cudaGetLastError();
  return launched ? launched : cudaDeviceSynchronize();
}

// pair: 0 to 3, e4m3 x e4m3, e4m3 x e5m2, e5m2 x e4m3, e5m2 x e5m2. 0, or a cudaError_t. D keeps its bytes where nothing was written.
extern "C" int fp8ref_wgmma(int pair, const uint8_t* A, const uint8_t* B, const float* C, float* D, int tiles, int lead, int stride) {
  const size_t sizes[4] = {size_t(tiles) * M * K, size_t(tiles) * N * K, size_t(tiles) * M * N * 4, size_t(tiles) * M * N * 4};
  const void* from[4] = {A, B, C, D};
  void* on[4] = {};
  int error = 0;
  for (int i = 0; i < 4 && !error; i++) {
    error = cudaMalloc(&on[i], sizes[i]);
    if (!error) error = cudaMemcpy(on[i], from[i], sizes[i], cudaMemcpyHostToDevice);
  }
  if (!error) error = on_device(pair, (uint8_t*)on[0], (uint8_t*)on[1], (float*)on[2], (float*)on[3], tiles, lead, stride);
  if (!error) error = cudaMemcpy(D, on[3], sizes[3], cudaMemcpyDeviceToHost);
  for (void* memory : on) cudaFree(memory);
  return error;
}

// Name, compute capability (10 * major + minor) and driver's version of the first device. 0, or a cudaError_t.
extern "C" int fp8ref_device(char* name, int length, int* capability, int* driver) {
  cudaDeviceProp properties;
  int error = cudaGetDeviceProperties(&properties, 0);
  if (!error) error = cudaDriverGetVersion(driver);
  if (error) return error;
  for (int i = 0; i < length; i++) {
    name[i] = properties.name[i];
    if (!name[i]) break;
  }
  name[length - 1] = 0;
  *capability = 10 * properties.major + properties.minor;
  return 0;
}

extern "C" const char* fp8ref_error(int error) { return cudaGetErrorString((cudaError_t)error); }
