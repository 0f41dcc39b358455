// Attention in float32 for any head size up to 256: a warp works on one row of queries (or keys), its lanes first on 32
// partners, then on the row's components. Sums run in a fixed order.
// The generator defines BATCH, HEADS, KV, SEQ, D, STAT (row pitch of the log-sum-exp), CAUSAL, SCALE and the readers q_, k_, v_,
// dy_, y_ (address of a row's first element) and their element strides.
#define R ((D + 31) / 32)
#define GROUP (HEADS / KV)

DEV float warp_max(float x) { return warp_all<Max>(x); }

// Dot product of a row held in shared memory with a row of memory whose components lie `step` apart.
template <class T> DEV float dot(const float* row, const T* p, u32 step) {
  float s = 0.0f;
#pragma unroll 8
  for (int d = 0; d < D; d++) s = fmaf(row[d], up(p[(u64)d * step]), s);
  return s;
}
// acc += sum over 32 partners of weight (one a lane) times their rows.
template <class T, class F> DEV void add_rows(float (&acc)[R], float weight, int count, u32 step, F row) {
  const int lane = threadIdx.x % 32;
  for (int j = 0; j < count; j++) {
    const float p = __shfl_sync(0xffffffffu, weight, j);
    const T* x = row(j);
#pragma unroll
    for (int r = 0; r < R; r++)
      if (r * 32 + lane < D) acc[r] = fmaf(p, up(x[(u64)(r * 32 + lane) * step]), acc[r]);
  }
}
