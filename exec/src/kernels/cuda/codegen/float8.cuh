// Casts a matrix of R rows and C columns to 8 bits, with a scale for each block of 128 columns of a row, or with SQUARE of 128 rows. With
// TURNED, the matrix is the transpose of x. A block of threads has LINES lines of x, as many numbers ACROSS each, in registers; codes go
// through shared memory, so that both x and the codes are accessed along their rows.
#define ROWS (SQUARE ? 128 : 32)
#define LINES (TURNED ? 128 : ROWS)
#define ACROSS (TURNED ? ROWS : 128)
#define EACH (ACROSS / 32)

KERNEL(256) k0(PARAMETERS) {
  // Four bytes more per row: threads that write a column use all banks.
  __shared__ __align__(16) u8 codes[ROWS][132];
  __shared__ float most[8][33];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u64 row = (u64)blockIdx.y * ROWS, column = (u64)blockIdx.x * 128;
  const u64 line = TURNED ? column : row, first = (TURNED ? row : column) + lane * EACH;
  const u64 lines = TURNED ? C : R, width = TURNED ? R : C;
  float v[LINES / 8][EACH];
#pragma unroll
  for (int j = 0; j < LINES / 8; ++j) {
    const u64 at = line + warp + 8 * j;
    const auto* from = FROM + at * width + first;
    if (VECTORS && at < lines && first < width) {
      load<X, EACH>(from, v[j]);
    } else {
#pragma unroll
      for (int i = 0; i < EACH; ++i) v[j][i] = at < lines && first + i < width ? up(from[i]) : 0.0f;
    }
  }
  // A scale for each line of the thread, or for each number across.
  float scale[TURNED || SQUARE ? 1 : LINES / 8];
#if SQUARE || TURNED
  float m = 0.0f;
#pragma unroll
  for (int j = 0; j < LINES / 8; ++j)
#pragma unroll
    for (int i = 0; i < EACH; ++i) m = fmaxf(m, fabsf(v[j][i]));
#if SQUARE
#pragma unroll
  for (int d = 16; d > 0; d /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
#endif
  most[warp][lane] = m;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; ++w) m = fmaxf(m, most[w][lane]);
  scale[0] = power_of_two(scale_(MOST, m));
  if (SQUARE ? threadIdx.x == 0 : warp == 0 && row + lane < R) down(1.0f / scale[0], INVERSE[SQUARE ? blockIdx.y * S0 + blockIdx.x * S1 : (row + lane) * S0 + blockIdx.x * S1]);
#else
#pragma unroll
  for (int j = 0; j < LINES / 8; ++j) {
    float m = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) m = fmaxf(m, fabsf(v[j][i]));
#pragma unroll
    for (int d = 16; d > 0; d /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, d));
    scale[j] = power_of_two(scale_(MOST, m));
    const u64 at = row + warp + 8 * j;
    if (lane == 0 && at < R) down(1.0f / scale[j], INVERSE[at * S0 + blockIdx.x * S1]);
  }
#endif
#pragma unroll
  for (int j = 0; j < LINES / 8; ++j)
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      Y code;
      down(scaled_(v[j][i], scale[TURNED || SQUARE ? 0 : j]), code);
      const u32 of_line = warp + 8 * j, across = lane * EACH + i;
      codes[TURNED ? across : of_line][TURNED ? of_line : across] = code.x;
    }
  __syncthreads();
  const u64 to = column + lane * 4;
  for (u32 r = warp; r < ROWS; r += 8) {
    if (row + r >= R || to >= C) continue;
    const u32 four = *reinterpret_cast<const u32*>(&codes[r][lane * 4]);
    auto* y = TO + (row + r) * C + to;
    if (VECTORS) {
      *reinterpret_cast<u32*>(y) = four;
    } else {
      for (int i = 0; i < 4 && to + i < C; ++i) y[i].x = (u8)(four >> 8 * i);
    }
  }
}
