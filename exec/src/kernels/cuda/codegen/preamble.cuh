// Element types, conversions, vector loads and stores, reductions: what every generated kernel starts with.
// Nothing here is contracted into fused multiply-adds unless it says so (--fmad=false), so that fused and separate
// operations give the same bits.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned char u8;
struct bf16 { unsigned short x; };
struct f16 { unsigned short x; };
struct e4m3 { u8 x; };
struct e5m2 { u8 x; };
#define DEV __device__ __forceinline__
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
// Of which a multiprocessor has this many blocks at once.
#define KERNELS(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define INF __int_as_float(0x7f800000)

// Waits for the results of the kernel before this one on its stream, and lets the next one start, which waits in turn.
#if __CUDA_ARCH__ >= 900
DEV void wait_for_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#else
DEV void wait_for_previous() {}
#endif

DEV float up(float x) { return x; }
DEV float up(bf16 x) { return __uint_as_float((u32)x.x << 16); }
DEV float up(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.x)); return y; }
DEV float up(i64 x) { return (float)x; }
DEV float up(u8 x) { return (float)x; }
DEV void down(float x, float& y) { y = x; }
DEV void down(float x, bf16& y) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.x) : "f"(x)); }
DEV void down(float x, f16& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.x) : "f"(x)); }
DEV void down(float x, i64& y) { y = (i64)x; }
DEV void down(float x, u8& y) { y = (u8)fminf(fmaxf(x, 0.0f), 255.0f); }
#if __CUDA_ARCH__ >= 890
// Two numbers in 8 bits, the first one in the low byte: to nearest, ties to even, saturated.
DEV unsigned short narrow(float a, float b, e4m3) { unsigned short y; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(b), "f"(a)); return y; }
DEV unsigned short narrow(float a, float b, e5m2) { unsigned short y; asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(b), "f"(a)); return y; }
DEV void down(float x, e4m3& y) { y.x = (u8)narrow(x, 0.0f, y); }
DEV void down(float x, e5m2& y) { y.x = (u8)narrow(x, 0.0f, y); }
DEV float up(e4m3 x) { u32 y; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((unsigned short)x.x)); return up(f16{(unsigned short)y}); }
DEV float up(e5m2 x) { return up(f16{(unsigned short)(x.x << 8)}); }
#endif
template <class T> DEV float rounded(float x) { T y; down(x, y); return up(y); }
template <> DEV float rounded<float>(float x) { return x; }
template <> DEV float rounded<i64>(float x) { return x; }
template <> DEV float rounded<u8>(float x) { return x; }

template <class T, int V> struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack { T e[V]; };
template <class T, int V> DEV void unpack(const Pack<T, V>& p, float (&a)[V]) {
#pragma unroll
  for (int v = 0; v < V; v++) a[v] = up(p.e[v]);
}
template <class T, int V> DEV void load(const T* p, float (&a)[V]) {
  Pack<T, V> t = *reinterpret_cast<const Pack<T, V>*>(p);
  unpack<T, V>(t, a);
}
template <class T, int V> DEV void load_each(const T* p, u64 step, float (&a)[V]) {
#pragma unroll
  for (int v = 0; v < V; v++) a[v] = up(p[v * step]);
}
template <int V> DEV void pack(const float (&a)[V], Pack<bf16, V>& t) {
  if (V % 2 == 0) {
    u32* w = reinterpret_cast<u32*>(&t);
#pragma unroll
    for (int v = 0; v + 1 < V; v += 2) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[v / 2]) : "f"(a[v + 1]), "f"(a[v]));
  } else {
#pragma unroll
    for (int v = 0; v < V; v++) down(a[v], t.e[v]);
  }
}
template <class T, int V> DEV void pack(const float (&a)[V], Pack<T, V>& t) {
#pragma unroll
  for (int v = 0; v < V; v++) down(a[v], t.e[v]);
}
#if __CUDA_ARCH__ >= 890
template <class T, int V> DEV void pack_pairs(const float (&a)[V], Pack<T, V>& t) {
  if constexpr (V % 2 == 0) {
    unsigned short* w = reinterpret_cast<unsigned short*>(&t);
#pragma unroll
    for (int v = 0; v < V; v += 2) w[v / 2] = narrow(a[v], a[v + 1], T());
  } else {
#pragma unroll
    for (int v = 0; v < V; v++) down(a[v], t.e[v]);
  }
}
template <int V> DEV void pack(const float (&a)[V], Pack<e4m3, V>& t) { pack_pairs(a, t); }
template <int V> DEV void pack(const float (&a)[V], Pack<e5m2, V>& t) { pack_pairs(a, t); }
#endif
template <class T, int V> DEV void store(T* p, const float (&a)[V]) {
  Pack<T, V> t;
  pack(a, t);
  *reinterpret_cast<Pack<T, V>*>(p) = t;
}
// For what is not read again soon.
template <class T, int V> DEV void store_once(T* p, const float (&a)[V]) {
  Pack<T, V> t;
  pack(a, t);
  if constexpr (sizeof(t) == 16) __stcs(reinterpret_cast<uint4*>(p), *reinterpret_cast<uint4*>(&t));
  else *reinterpret_cast<Pack<T, V>*>(p) = t;
}
template <class T, int V> DEV void store_each(T* p, u64 step, const float (&a)[V]) {
#pragma unroll
  for (int v = 0; v < V; v++) down(a[v], p[v * step]);
}
template <class T> constexpr bool IS_BF16 = false;
template <> constexpr bool IS_BF16<bf16> = true;
template <class T, int V> DEV void round_all(float (&a)[V]) {
  if constexpr (IS_BF16<T> && V % 2 == 0) {
    // One conversion for two.
    Pack<bf16, V> t;
    pack(a, t);
    unpack<bf16, V>(t, a);
  } else {
#pragma unroll
    for (int v = 0; v < V; v++) a[v] = rounded<T>(a[v]);
  }
}

// The fast forms are for results that are rounded to 16 bits.
template <bool F> DEV float exp_(float x) { return F ? __expf(x) : expf(x); }
template <bool F> DEV float div_(float a, float b) { return F ? __fdividef(a, b) : a / b; }
// 2^x to about two units in the last place.
DEV float ex2(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#define LOG2E 1.44269504f
DEV float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// What `__expf` and `__fdividef` give here, without their care for numbers below 2^-126: beside 1 these do not count.
template <bool F> DEV float sigmoid_(float x) { return F ? reciprocal(1.0f + ex2(x * -LOG2E)) : 1.0f / (1.0f + expf(-x)); }
// `__fdividef` is zero beyond 2^126, where the quotient by `1 + e^-x` vanishes anyway, but not for the largest x.
template <bool F> DEV float silu_(float x) { return F ? x * sigmoid_<F>(x) : x / (1.0f + expf(-x)); }
template <bool F> DEV float tanh_(float x) { return F ? 1.0f - div_<F>(2.0f, exp_<F>(fminf(2.0f * x, 80.0f)) + 1.0f) : tanhf(x); }
template <bool F> DEV float silu_grad_(float g, float x) {
  float s = sigmoid_<F>(x);
  return g * (s * (1.0f + x * (1.0f - s)));
}
#define GELU_C 0.7978846f
#define GELU_A 0.044715f
template <bool F> DEV float gelu_(float x) { return 0.5f * x * (1.0f + tanh_<F>(GELU_C * (x + GELU_A * x * x * x))); }
template <bool F> DEV float gelu_grad_(float g, float x) {
  float t = tanh_<F>(GELU_C * (x + GELU_A * x * x * x));
  float dt = (1.0f - t * t) * GELU_C * (1.0f + 3.0f * GELU_A * x * x);
  return g * (0.5f * (1.0f + t) + 0.5f * x * dt);
}
// Takes a vector into a running maximum `m` and the sum `s` of exponentials relative to it. A NaN is passed over by the
// maximum and lands in the sum.
template <int V> DEV void running(float& m, float& s, const float (&a)[V]) {
  float n = m;
#pragma unroll
  for (int v = 0; v < V; v++) n = fmaxf(n, a[v]);
  const float z = (n == -INF ? 0.0f : n) * LOG2E;
  float e = 0.0f;
#pragma unroll
  for (int v = 0; v < V; v++) e += ex2(fmaf(a[v], LOG2E, -z));
  s = fmaf(s, ex2(fmaf(m, LOG2E, -z)), e);
  m = n;
}
// The factor that turns the largest absolute value of a tensor into `most`: 1 for zeros and infinities.
DEV float scale_(float most, float amax) { return amax > 0.0f && amax < INF ? fminf(most / amax, 3.40282347e38f) : 1.0f; }
// The largest power of two that is not above a positive factor.
DEV float power_of_two(float scale) { return __uint_as_float(__float_as_uint(scale) & 0xff800000u); }
// Infinities become NaN, so that casts to 8 bits do not hide them.
DEV float scaled_(float x, float scale) { return fabsf(x) < INF ? x * scale : __uint_as_float(0x7fffffffu); }
DEV float relu_(float x) { return x < 0.0f ? 0.0f : x; }
DEV float relu_grad_(float g, float y) { return y <= 0.0f ? 0.0f : g; }

// A NaN is taken, and then kept.
DEV float max_(float a, float b) { return (b != b || b > a) ? b : a; }
struct Sum { static DEV float of(float a, float b) { return a + b; } static DEV float none() { return 0.0f; } };
// Absolute values; a NaN is passed over.
struct Amax { static DEV float of(float a, float b) { return fmaxf(a, b); } static DEV float none() { return 0.0f; } };
struct Max { static DEV float of(float a, float b) { return max_(a, b); } static DEV float none() { return -INF; } };
template <class O> DEV float warp_all(float x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x = O::of(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}
// The same of T threads of a warp, a power of two; those beside them may have another row, or none.
template <class O, int T> DEV float part_all(float x) {
  const u32 mask = ((1u << T) - 1u) << (threadIdx.x % 32 / T * T);
#pragma unroll
  for (int d = T / 2; d > 0; d /= 2) x = O::of(x, __shfl_xor_sync(mask, x, d));
  return x;
}
// All threads of a row of T threads get the result; the order depends on T alone. `s` holds 32 floats.
template <class O, int T> DEV float row_all(float x, float* s) {
  if constexpr (T < 32) return part_all<O, T>(x);
  x = warp_all<O>(x);
  if (T > 32) {
    __syncthreads();
    if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = x;
    __syncthreads();
    x = (threadIdx.x % 32 < T / 32) ? s[threadIdx.x % 32] : O::none();
    x = warp_all<O>(x);
  }
  return x;
}
// The same where a block has several rows: `group` of T threads (at least two warps) waits for its own threads only.
template <class O, int T> DEV float group_all(float x, float* s, u32 group) {
  x = warp_all<O>(x);
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x % T / 32;
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(T) : "memory");
  if (lane == 0) s[group * 32 + warp] = x;
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(T) : "memory");
  x = lane < T / 32 ? s[group * 32 + lane] : O::none();
  return warp_all<O>(x);
}
DEV double warp_sum(double x) {
#pragma unroll
  for (int d = 16; d > 0; d /= 2) x += __shfl_down_sync(0xffffffffu, x, d);
  return x;
}
// Thread 0 of a block of T threads gets the sum.
template <int T> DEV double block_sum(double x) {
  __shared__ double s[32];
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x < T / 32 ? s[threadIdx.x] : 0.0;
  if (threadIdx.x < 32) x = warp_sum(x);
  return x;
}
// Notes what is wrong with the inputs of a launch, once, for the host to find.
DEV void note(i64 what, u64* fault, u32 launch) {
  atomicCAS(fault, 0ull, ((u64)(launch + 1) << 40) | ((u64)what & 0xffffffffffull));
}
// Notes an id outside its range.
DEV bool bad_id(i64 id, i64 limit, u64* fault, u32 launch) {
  if (id >= 0 && id < limit) return false;
  note(id, fault, launch);
  return true;
}

// Whether the calling block is the last of `n` to ask; it sees all that the others wrote. All threads of a block ask.
DEV bool is_last(u32* ticket, u32 n) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(ticket, n - 1) == n - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Copies to shared memory that go on while the thread does something else; `copy_wait<n>` waits for all but the last `n`
// groups of the thread's own.
DEV void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
DEV void copy_done() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEV void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// The blocks of a cluster wait for one another.
DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
// Writes into the shared memory of a block of the cluster.
DEV void tell(float2* mine, u32 block, float x, float y) {
  u32 at = (u32)__cvta_generic_to_shared(mine);
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(block));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}
