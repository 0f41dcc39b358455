// One product per expert: a tile of TM x TN of the result per block. Both factors come as tiles [row or column][inner]
// in shared memory; 16-bit ones are multiplied by tensor cores, 8-bit ones as float16, others in float32, all in the
// order of the inner dimension.
#define TM 128u
#define TN 128u
#define TK 32u
#define PITCH (TK + 8u)
#define THREADS 256u

template <class S, class T> DEV void take(S x, T& y) { down(up(x), y); }
template <class T> DEV void take(T x, T& y) { y = x; }

// Loads a tile: entry (i, k) is p[i * step + k], or p[k * step + i] if COLUMNS. Rows of p start at multiples of V
// elements. What lies outside is zero.
template <bool COLUMNS, int V, class T, class S>
DEV void load_tile(T (*tile)[PITCH], const S* p, u64 step, u32 i0, u32 i_end, u32 k0, u32 k_end) {
  constexpr u32 LINE = COLUMNS ? 128u : TK, LINES = COLUMNS ? TK : 128u;
  for (u32 n = threadIdx.x; n < LINE * LINES / V; n += THREADS) {
    const u32 line = n / (LINE / V), at = n % (LINE / V) * V;
    const u32 i = COLUMNS ? at : line, k = COLUMNS ? line : at;
    Pack<S, V> x = {};
    const bool in = i0 + i < i_end && k0 + k < k_end;
    if (in) x = *reinterpret_cast<const Pack<S, V>*>(p + (COLUMNS ? (k0 + k) * step + i0 + i : (i0 + i) * step + k0 + k));
    // A vector reaches beyond neither end: both are multiples of V where lines are.
#pragma unroll
    for (int v = 0; v < V; v++) {
      if (COLUMNS) take(x.e[v], tile[at + v][line]);
      else take(x.e[v], tile[line][at + v]);
    }
  }
}

DEV void multiply_16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2], bf16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEV void multiply_16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2], f16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <class T> DEV u32 two(const T* p) { return *reinterpret_cast<const u32*>(p); }

// The part of the result that a thread has, of 16-bit factors: a warp has 64 x 32.
template <class T> struct Result {
  float c[4][4][4];
  DEV void clear() {
#pragma unroll
    for (int i = 0; i < 64; i++) c[i / 16][i / 4 % 4][i % 4] = 0.0f;
  }
  DEV void add(const T (*a)[PITCH], const T (*b)[PITCH]) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, m = warp % 2 * 64 + lane / 4, n = warp / 2 * 32 + lane / 4;
#pragma unroll
    for (u32 k = lane % 4 * 2; k < TK; k += 16) {
      u32 x[4][4], y[4][2];
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        x[i][0] = two(&a[m + i * 16][k]), x[i][1] = two(&a[m + i * 16 + 8][k]);
        x[i][2] = two(&a[m + i * 16][k + 8]), x[i][3] = two(&a[m + i * 16 + 8][k + 8]);
        y[i][0] = two(&b[n + i * 8][k]), y[i][1] = two(&b[n + i * 8][k + 8]);
      }
#pragma unroll
      for (u32 i = 0; i < 4; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) multiply_16(c[i][j], x[i], y[j], T());
    }
  }
  template <class O> DEV void store(float by, O* out, u64 step, u32 rows, u32 columns) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (u32 n = 0; n < 64; n++) {
      const u32 i = warp % 2 * 64 + n / 16 * 16 + n / 2 % 2 * 8 + lane / 4;
      const u32 j = warp / 2 * 32 + n / 4 % 4 * 8 + lane % 4 * 2 + n % 2;
      if (i < rows && j < columns) down(c[n / 16][n / 4 % 4][n % 4] * by, out[i * step + j]);
    }
  }
};
// The same of other factors: a thread has every 16th row and column.
template <> struct Result<float> {
  float c[8][8];
  DEV void clear() {
#pragma unroll
    for (int i = 0; i < 64; i++) c[i / 8][i % 8] = 0.0f;
  }
  DEV void add(const float (*a)[PITCH], const float (*b)[PITCH]) {
    const u32 m = threadIdx.x / 16, n = threadIdx.x % 16;
    for (u32 k = 0; k < TK; k++) {
      float x[8], y[8];
#pragma unroll
      for (u32 i = 0; i < 8; i++) x[i] = a[m + i * 16][k], y[i] = b[n + i * 16][k];
#pragma unroll
      for (u32 i = 0; i < 8; i++)
#pragma unroll
        for (u32 j = 0; j < 8; j++) c[i][j] = fmaf(x[i], y[j], c[i][j]);
    }
  }
  template <class O> DEV void store(float by, O* out, u64 step, u32 rows, u32 columns) {
    const u32 m = threadIdx.x / 16, n = threadIdx.x % 16;
#pragma unroll
    for (u32 i = 0; i < 8; i++)
#pragma unroll
      for (u32 j = 0; j < 8; j++)
        if (m + i * 16 < rows && n + j * 16 < columns) down(c[i][j] * by, out[(m + i * 16) * step + n + j * 16]);
  }
};

// Computes a tile of `rows` x `columns`, from row i0 of a and column j0 of b, over the inner entries k0..k_end, in type T, and multiplies it.
template <bool A_COLUMNS, bool B_COLUMNS, int V, class T, class A, class B, class O>
DEV void product(const A* a, u64 a_step, u32 i0, u32 i_end, const B* b, u64 b_step, u32 j0, u32 j_end, u32 k0, u32 k_end, float by, O* out, u64 step) {
  __shared__ alignas(16) T x[TM][PITCH], y[TN][PITCH];
  Result<T> c;
  c.clear();
  for (u32 k = k0; k < k_end; k += TK) {
    __syncthreads();
    load_tile<A_COLUMNS, V>(x, a, a_step, i0, i_end, k, k_end);
    load_tile<B_COLUMNS, V>(y, b, b_step, j0, j_end, k, k_end);
    __syncthreads();
    c.add(x, y);
  }
  c.store(by, out + i0 * step + j0, step, i_end - i0, j_end - j0);
}

// The expert and first row of a block's tile, and the end of the expert's rows; false if there is no such tile. A thread
// counts the tiles of some adjacent experts.
template <u32 E> DEV bool find_tile(const i64* offsets, u32 tile, u32& expert, u32& row, u32& end) {
  constexpr u32 EACH = (E + THREADS - 1) / THREADS;
  __shared__ u32 sums[THREADS], found[3];
  u32 mine = 0;
  for (u32 e = threadIdx.x * EACH; e < (threadIdx.x + 1) * EACH && e < E; e++) mine += (u32)(offsets[e + 1] - offsets[e] + TM - 1) / TM;
  sums[threadIdx.x] = mine;
  if (threadIdx.x == 0) found[0] = E;
  for (u32 d = 1; d < THREADS; d *= 2) {
    __syncthreads();
    const u32 before = threadIdx.x >= d ? sums[threadIdx.x - d] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
  }
  __syncthreads();
  u32 first = sums[threadIdx.x] - mine;
  if (tile >= first && tile < first + mine) {
    for (u32 e = threadIdx.x * EACH; e < (threadIdx.x + 1) * EACH && e < E; e++) {
      const u32 tiles = (u32)(offsets[e + 1] - offsets[e] + TM - 1) / TM;
      if (tile >= first && tile < first + tiles) found[0] = e, found[1] = (u32)offsets[e] + (tile - first) * TM, found[2] = (u32)offsets[e + 1];
      first += tiles;
    }
  }
  __syncthreads();
  expert = found[0], row = found[1], end = found[2];
  return expert < E;
}
