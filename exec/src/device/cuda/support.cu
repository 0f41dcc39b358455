// Small kernels of the device itself. Sums have an order that depends on sizes alone.
typedef unsigned int u32;
typedef unsigned long long u64;

// Dtypes: 0 float32, 1 bfloat16, 2 float16.
static __device__ __forceinline__ float element(const void* p, u64 i, u32 dtype) {
  if (dtype == 0) return ((const float*)p)[i];
  unsigned short h = ((const unsigned short*)p)[i];
  if (dtype == 1) return __uint_as_float((u32)h << 16);
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(h));
  return y;
}

// Keeps one multiprocessor busy for so many nanoseconds.
extern "C" __global__ void spin(u64 ns) {
  u64 begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(200);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < ns);
}

static __device__ double block_sum(double x) {
  __shared__ double s[32];
  for (int d = 16; d > 0; d /= 2) x += __shfl_down_sync(0xffffffffu, x, d);
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x < blockDim.x / 32 ? s[threadIdx.x] : 0.0;
  if (threadIdx.x < 32)
    for (int d = 16; d > 0; d /= 2) x += __shfl_down_sync(0xffffffffu, x, d);
  __syncthreads();
  return x;
}

// Sums of squares, one a block; added to those that are there unless `first`.
extern "C" __global__ void __launch_bounds__(512) squares(const void* p, u64 n, u32 dtype, u32 first, double* sums) {
  double x = 0.0;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
    float v = element(p, i, dtype);
    x += (double)v * (double)v;
  }
  x = block_sum(x);
  if (threadIdx.x == 0) sums[blockIdx.x] = first ? x : sums[blockIdx.x] + x;
}

// The sum of `n` sums, at most a block of them, as a float32.
extern "C" __global__ void __launch_bounds__(512) total(const double* sums, u32 n, float* out) {
  double x = threadIdx.x < n ? sums[threadIdx.x] : 0.0;
  x = block_sum(x);
  if (threadIdx.x == 0) *out = (float)x;
}

// Leaves the first instruction that wrote a NaN, and where.
extern "C" __global__ void __launch_bounds__(512) find_nan(const void* p, u64 n, u32 dtype, u64 label, u64* found) {
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
    float v = element(p, i, dtype);
    if (v != v) {
      u64 before = atomicCAS(found, 0ull, label);
      if (before == 0ull || before == label) atomicMin(found + 1, i);
      return;
    }
  }
}

// Multiplies in place.
extern "C" __global__ void __launch_bounds__(512) scale(const void* from, void* to, u64 n, u32 dtype, float by) {
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
    float v = element(from, i, dtype) * by;
    if (dtype == 0) {
      ((float*)to)[i] = v;
    } else {
      unsigned short h;
      if (dtype == 1) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
      else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
      ((unsigned short*)to)[i] = h;
    }
  }
}
