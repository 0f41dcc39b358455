// Kernels of the sharding engine over many ranges at once. The generator defines CAP (most ranges of one launch), WIDTH (operands
// a range) and CHUNK (elements of a block). A launch gets its table by value; block b works on CHUNK elements of the range in whose span of blocks it lies.
struct Table {
  u64 at[CAP][WIDTH];
  u64 n[CAP];
  u32 first[CAP + 1];
  u32 count;
};
struct Part { u32 e; u64 from; u64 n; };
// The range of a block, and which of its elements.
DEV Part part_of(const Table& t) {
  u32 lo = 0, hi = t.count;
  while (hi - lo > 1) {
    const u32 mid = (lo + hi) / 2;
    if (t.first[mid] <= blockIdx.x) lo = mid; else hi = mid;
  }
  Part p;
  p.e = lo;
  p.from = (u64)(blockIdx.x - t.first[lo]) * CHUNK;
  const u64 rest = t.n[lo] - p.from;
  p.n = rest < CHUNK ? rest : CHUNK;
  return p;
}
template <class T> DEV T* operand(const Table& t, const Part& p, int which) {
  return reinterpret_cast<T*>(t.at[p.e][which]) + p.from;
}
DEV bool aligned(const void* a) { return ((u64)a & 15) == 0; }

// Settings of the step for one parameter group, made on the host.
struct Hyper { float lr, decay, blend, beta2, rest2, step, root, eps, clip_norm, weight_decay, muon_rest, muon_rms; };
// What gradients are multiplied by; a NaN spreads.
DEV float clip_factor(const Hyper* h, const float* square) {
  if (!square || h->clip_norm <= 0.0f) return 1.0f;
  const float f = h->clip_norm / (sqrtf(*square) + 1e-6f);
  return f > 1.0f ? 1.0f : f;
}

// The larger number, or a NaN.
DEV float larger(float a, float b) { return b > a || b != b ? b : a; }
// The code of the factor nearest to x, the larger of two.
DEV u8 nearest_code(const float* map, float x) {
  int code = 0;
#pragma unroll
  for (int step = 128; step; step >>= 1) code += x >= map[code + step] ? step : 0;
  const int above = code < 255 ? code + 1 : 255;
  return (u8)(x - map[code] >= (map[above] - map[code]) * 0.5f ? above : code);
}

// Moves the chunk: `f(to, from)` gives the new values of a few elements.
template <class S, class T, bool READS, class F> DEV void each(const S* __restrict__ s, T* __restrict__ d, u64 n, F f) {
  u64 done = 0;
  if (aligned(d) && (!READS || aligned(s))) {
    done = n / 8 * 8;
#pragma unroll 4
    for (u64 k = threadIdx.x * 8; k < done; k += 2048) {
      float a[8], b[8];
      if (READS) load<S, 8>(s + k, b);
      f.template before<T, 8>(d + k, a);
#pragma unroll
      for (int v = 0; v < 8; v++) a[v] = f.of(a[v], b[v]);
      store<T, 8>(d + k, a);
    }
  }
  for (u64 k = done + threadIdx.x; k < n; k += 256) {
    float a[1], b[1];
    if (READS) b[0] = up(s[k]);
    f.template before<T, 1>(d + k, a);
    down(f.of(a[0], b[0]), d[k]);
  }
}
struct Take {
  template <class T, int V> DEV void before(const T*, float (&)[V]) const {}
  DEV float of(float, float b) const { return b; }
};
struct Plus {
  template <class T, int V> DEV void before(const T* p, float (&a)[V]) const { load<T, V>(p, a); }
  DEV float of(float a, float b) const { return a + b; }
};
struct Times {
  float factor;
  template <class T, int V> DEV void before(const T* p, float (&a)[V]) const { load<T, V>(p, a); }
  DEV float of(float a, float) const { return a * factor; }
};
// Codes of weights, which are rounded first.
template <class R> struct Coded {
  float scale;
  template <class T, int V> DEV void before(const T*, float (&)[V]) const {}
  DEV float of(float, float b) const { return scaled_(rounded<R>(b), scale); }
};
// Pieces that lie `apart` bytes apart, each times the factor, added in order; then to what is there, if asked to. All loads of a
// few elements are under way before the first addition.
template <class S, class T, int PIECES, bool ADDS> DEV void sum_pieces(const S* __restrict__ s, u64 apart, T* __restrict__ d, u64 n, float factor) {
  const u64 step = apart / sizeof(S);
  u64 done = 0;
  if (aligned(d) && aligned(s) && apart % 16 == 0) {
    done = n / 4 * 4;
#pragma unroll 2
    for (u64 k = threadIdx.x * 4; k < done; k += 1024) {
      float x[PIECES][4], a[4];
#pragma unroll
      for (int r = 0; r < PIECES; r++) load<S, 4>(s + r * step + k, x[r]);
      if (ADDS) load<T, 4>(d + k, a);
#pragma unroll
      for (int v = 0; v < 4; v++) {
        float sum = x[0][v] * factor;
#pragma unroll
        for (int r = 1; r < PIECES; r++) sum = __fadd_rn(sum, __fmul_rn(x[r][v], factor));
        a[v] = ADDS ? a[v] + sum : sum;
      }
      store<T, 4>(d + k, a);
    }
  }
  for (u64 k = done + threadIdx.x; k < n; k += 256) {
    float sum = up(s[k]) * factor;
    for (int r = 1; r < PIECES; r++) sum = __fadd_rn(sum, __fmul_rn(up(s[r * step + k]), factor));
    down(ADDS ? up(d[k]) + sum : sum, d[k]);
  }
}
// Likewise, V elements for whoever needs the sums.
template <class S, int PIECES, int V> DEV void sum_of(const S* s, u64 apart, float factor, float (&out)[V]) {
  const u64 step = apart / sizeof(S);
  float x[PIECES][V];
#pragma unroll
  for (int r = 0; r < PIECES; r++) load<S, V>(s + r * step, x[r]);
#pragma unroll
  for (int v = 0; v < V; v++) {
    float sum = x[0][v] * factor;
#pragma unroll
    for (int r = 1; r < PIECES; r++) sum = __fadd_rn(sum, __fmul_rn(x[r][v], factor));
    out[v] = sum;
  }
}
// The same bytes, or zeros where there is no source, in words as wide as both addresses allow.
template <class T> DEV void words(const u8* __restrict__ s, u8* __restrict__ d, u64 n) {
  const u64 whole = n / sizeof(T);
#pragma unroll 8
  for (u64 k = threadIdx.x; k < whole; k += 256) {
    T x = {};
    if (s) x = reinterpret_cast<const T*>(s)[k];
    reinterpret_cast<T*>(d)[k] = x;
  }
  for (u64 k = whole * sizeof(T) + threadIdx.x; k < n; k += 256) d[k] = s ? s[k] : (u8)0;
}
DEV void raw(const u8* s, u8* d, u64 n) {
  const u64 low = (u64)s | (u64)d;
  if (low % 16 == 0) words<uint4>(s, d, n);
  else if (low % 8 == 0) words<u64>(s, d, n);
  else if (low % 4 == 0) words<u32>(s, d, n);
  else if (low % 2 == 0) words<unsigned short>(s, d, n);
  else words<u8>(s, d, n);
}
