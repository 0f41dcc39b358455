// Scores of a router's row, and the choice of its columns. One warp has a row of D columns in shared memory.
#define WARPS 4u

// Replaces the raw row in `s` by its softmax or sigmoids; returns the log-sum-exp of a softmax.
DEV float scores(float* s) {
  const u32 q = threadIdx.x % 32;
  if (SIGMOID) {
    for (u32 c = q; c < D; c += 32) s[c] = sigmoid_<false>(s[c]);
    __syncwarp();
    return 0.0f;
  }
  float m = -INF, sum = 0.0f;
  for (u32 c = q; c < D; c += 32) m = max_(m, s[c]);
  m = warp_all<Max>(m);
  for (u32 c = q; c < D; c += 32) sum += s[c] = expf(s[c] - m);
  sum = warp_all<Sum>(sum);
  for (u32 c = q; c < D; c += 32) s[c] /= sum;
  __syncwarp();
  return m + logf(sum);
}
template <class T> DEV void load_row(const T* x, float* s) {
  for (u32 c = threadIdx.x % 32; c < D; c += 32) s[c] = up(x[c]);
  __syncwarp();
}
// Divides sigmoids by their sum.
DEV void normalize(float* s) {
  float sum = 0.0f;
  for (u32 c = threadIdx.x % 32; c < D; c += 32) sum += s[c];
  sum = warp_all<Sum>(sum);
  for (u32 c = threadIdx.x % 32; c < D; c += 32) s[c] /= sum;
  __syncwarp();
}
// The position of the largest of `n` numbers, the lowest of equal ones; it becomes minus infinity.
DEV u32 take_largest(float* s, u32 n) {
  float best = -INF;
  u32 at = n - 1;
  for (u32 c = threadIdx.x % 32; c < n; c += 32)
    if (s[c] > best) best = s[c], at = c;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, best, d);
    const u32 there = __shfl_xor_sync(0xffffffffu, at, d);
    if (other > best || other == best && there < at) best = other, at = there;
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) s[at] = -INF;
  __syncwarp();
  return at;
}
