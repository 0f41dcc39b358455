// Attention in float32 arithmetic for any head size up to 256: a block of 16 x 16 threads works on TILE x TILE scores at a time,
// between tiles of rows in shared memory. Thread (ty, tx) has the scores of rows ty + 16 r and columns tx + 16 c, and of what is
// summed up over the columns, rows ty + 16 r and components 4 tx + 64 w and the three behind. Sums run in a fixed order.
// The generator defines BATCH, HEADS, KV, SEQ, D, STAT (row pitch of the log-sum-exp), CAUSAL, SCALE, TILE, what changes scores
// (WINDOW, CAPPED, CAP, ALIBI, SLOPES, DOCUMENTS, LENGTHS, PERIOD, DOCUMENTS_OF_DATA) and the readers q_, k_, v_, dy_, y_ (address of a row's first element) and their element
// strides.
#define GROUP (HEADS / KV)
#define TILES ((SEQ + TILE - 1) / TILE)
// Rows, and columns of scores, of a thread.
#define N (TILE / 16)
// Components, with zeros behind them; floats from row to row: an odd number of vectors, so that sixteen rows lie in all banks.
#define DP ((D + 3) / 4 * 4)
#define PITCH (DP + (DP / 4 % 2 ? 8 : 4))
#define SPITCH (TILE + 4)
// Vectors of components of a thread.
#define W ((DP + 63) / 64)
#define ROWS (TILE * PITCH)

typedef float Scores[N][N];
typedef float Sums[N][W][4];

// Rows from `first` on, in float32, zeros beyond the last one.
template <class F> DEV void fill(float* to, u32 first, u64 step, F row) {
#pragma unroll 4
  for (u32 x = threadIdx.x; x < TILE * DP; x += 256) {
    const u32 r = x / DP, d = x % DP;
    to[r * PITCH + d] = first + r < SEQ && d < D ? up(row(first + r)[d * step]) : 0.0f;
  }
}
// s = a b', over the components.
DEV void scores(Scores& s, const float* a, const float* b) {
  const u32 tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
  for (int r = 0; r < N; r++)
#pragma unroll
    for (int c = 0; c < N; c++) s[r][c] = 0.0f;
#pragma unroll 4
  for (u32 d = 0; d < DP; d += 4) {
    float4 x[N], y[N];
#pragma unroll
    for (int r = 0; r < N; r++) {
      x[r] = *reinterpret_cast<const float4*>(a + (ty + 16 * r) * PITCH + d);
      y[r] = *reinterpret_cast<const float4*>(b + (tx + 16 * r) * PITCH + d);
    }
#pragma unroll
    for (int r = 0; r < N; r++)
#pragma unroll
      for (int c = 0; c < N; c++) {
        s[r][c] = fmaf(x[r].x, y[c].x, s[r][c]);
        s[r][c] = fmaf(x[r].y, y[c].y, s[r][c]);
        s[r][c] = fmaf(x[r].z, y[c].z, s[r][c]);
        s[r][c] = fmaf(x[r].w, y[c].w, s[r][c]);
      }
  }
}
// acc += p x, over the tile's columns.
DEV void add(Sums& acc, const float* p, const float* x) {
  const u32 tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll 2
  for (u32 k = 0; k < TILE; k += 4) {
    float a[N][4];
#pragma unroll
    for (int r = 0; r < N; r++) *reinterpret_cast<float4*>(a[r]) = *reinterpret_cast<const float4*>(p + (ty + 16 * r) * SPITCH + k);
#pragma unroll
    for (int w = 0; w < W; w++) {
      const u32 d = 4 * tx + 64 * w;
      if (DP % 64 != 0 && d >= DP) break;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float4 y = *reinterpret_cast<const float4*>(x + (k + j) * PITCH + d);
#pragma unroll
        for (int r = 0; r < N; r++) {
          acc[r][w][0] = fmaf(a[r][j], y.x, acc[r][w][0]);
          acc[r][w][1] = fmaf(a[r][j], y.y, acc[r][w][1]);
          acc[r][w][2] = fmaf(a[r][j], y.z, acc[r][w][2]);
          acc[r][w][3] = fmaf(a[r][j], y.w, acc[r][w][3]);
        }
      }
    }
  }
}
// What the threads of a row make of their values.
template <class O> DEV float row16(float x) {
#pragma unroll
  for (int d = 8; d > 0; d /= 2) x = O::of(x, __shfl_xor_sync(0xffffffffu, x, d));
  return x;
}
// Leaves the scores where `add` finds them.
DEV void leave(float* to, const Scores& s) {
  const u32 tx = threadIdx.x % 16, ty = threadIdx.x / 16;
#pragma unroll
  for (int r = 0; r < N; r++)
#pragma unroll
    for (int c = 0; c < N; c++) to[(ty + 16 * r) * SPITCH + tx + 16 * c] = s[r][c];
}
// Writes the thread's part of row r.
template <class T> DEV void put(const float (&acc)[W][4], float factor, T* to, u64 step) {
  const u32 tx = threadIdx.x % 16;
#pragma unroll
  for (int w = 0; w < W; w++)
#pragma unroll
    for (int v = 0; v < 4; v++) {
      const u32 d = 4 * tx + 64 * w + v;
      if (d < D) down(acc[w][v] * factor, to[d * step]);
    }
}
#if DOCUMENTS_OF_DATA
// The first positions of the documents of all positions of a sample, in ascending order.
typedef const i64* Starts;
DEV u32 document_start(Starts starts, u32 i) { return (u32)starts[i]; }
DEV u32 document_end(Starts starts, u32 i) {
  const i64 start = starts[i];
  u32 low = i + 1, high = SEQ;
  while (low < high) {
    const u32 middle = (low + high) / 2;
    if (starts[middle] <= start) low = middle + 1;
    else high = middle;
  }
  return low;
}
DEV bool same_document(Starts starts, u32 query, u32 key) { return starts[query] == starts[key]; }
#else
struct Starts {};
#if DOCUMENTS
// The first position of the document of a position, and the position behind its last one. Documents have LENGTHS, again and again.
DEV u32 document_start(Starts, u32 i) {
  u32 start = i / PERIOD * PERIOD, next = start;
#pragma unroll
  for (int n = 0; n < DOCUMENTS; n++) {
    next += LENGTHS[n];
    if (next <= i) start = next;
  }
  return start;
}
DEV u32 document_end(Starts, u32 i) {
  u32 end = i / PERIOD * PERIOD;
#pragma unroll
  for (int n = 0; n < DOCUMENTS; n++)
    if (end <= i) end += LENGTHS[n];
  return min(end, SEQ);
}
#else
DEV u32 document_start(Starts, u32) { return 0; }
DEV u32 document_end(Starts, u32) { return SEQ; }
#endif
DEV bool same_document(Starts starts, u32 query, u32 key) {
  return key >= document_start(starts, query) && (CAUSAL || key < document_end(starts, query));
}
#endif
// Whether the query sees the key, of the same document. With a window, that is fewer than WINDOW positions away.
DEV bool sees(Starts starts, u32 query, u32 key) {
  if (query >= SEQ || key >= SEQ) return false;
  const bool near = WINDOW == 0 || ((key > query || query - key < WINDOW) && (key <= query || key - query < WINDOW));
  return (!CAUSAL || key <= query) && near && same_document(starts, query, key);
}
// The first and the last tile of keys that a tile of queries sees, and the last tile of queries that sees a tile of keys.
DEV u32 first_near(u32 tile) { return WINDOW == 0 || tile * TILE < WINDOW ? 0 : (tile * TILE + 1 - WINDOW) / TILE; }
DEV u32 first_tile(Starts starts, u32 tile) { return max(first_near(tile), document_start(starts, tile * TILE) / TILE); }
DEV u32 reach(Starts starts, u32 tile) {
  const u32 last = min(tile * TILE + TILE, SEQ) - 1;
  const u32 near = WINDOW == 0 ? TILES - 1 : min((tile * TILE + TILE - 1 + WINDOW - 1) / TILE, TILES - 1);
  return min(near, (document_end(starts, last) - 1) / TILE);
}
DEV u32 last_tile(Starts starts, u32 tile) { return CAUSAL ? tile : reach(starts, tile); }
DEV u32 last_query(Starts starts, u32 tile) { return reach(starts, tile); }
// The score of a query and a key from their dot product: scaled, softly limited, and with the slope of the head.
DEV float score(float dot, u32 head, u32 query, u32 key) {
  float s = SCALE * dot;
#if CAPPED
  s = CAP * tanhf(s / CAP);
#endif
#if ALIBI
  s += SLOPES[head] * ((float)key - (float)query);
#endif
  return s;
}
// The derivative of the score by the dot product.
DEV float slope(float dot) {
#if CAPPED
  const float t = tanhf(SCALE * dot / CAP);
  return SCALE * (1.0f - t * t);
#else
  return SCALE;
#endif
}
