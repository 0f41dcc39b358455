// Matrix products that go on with elementwise code: `c[M, N] = a[M, K] b`, for one or two factors `b` (PRODUCTS) of one `a`, in 16 bits
// with float32 sums on Hopper's tensor cores.
//
// Two blocks work on neighbouring tiles of 128 rows; their 256 columns, of two factors 128 of each, are the same, so each loads its own
// rows and half of the columns, which it sends to both. The first warp loads, a step of KSTEP ahead of another as long as there is room;
// two groups of four warps multiply, each 64 rows; when a tile is done they round it into shared memory and go on with the next one, while
// the other three warps of the first group do the rest and write. Which tile is next is asked of a counter, since a multiprocessor may
// be busy with something else at first.
#define KSTEP 64
#define STAGES 3
#define A_BYTES (128 * KSTEP * 2)
#define B_BYTES (256 * KSTEP * 2)
#define C_BYTES (128 * 256 * 2)
// Tiles of a block's loader are never as many ahead of its writers.
#define RING 8
// Columns of a factor in a tile, vectors of a row of them, rows that a warp's vectors make up.
#define WIDE (256 / PRODUCTS)
#define VECTORS (WIDE / 8)
#define ROWS (32 / VECTORS)
// Pairs of tiles below and beside one another, and how many are taken downwards before the next columns.
#define PAIRS ((M + 255) / 256)
#define ACROSS ((N + WIDE - 1) / WIDE)
#define DOWN 8
#define TILES (PAIRS * ACROSS)
#define DEPTH ((K + KSTEP - 1) / KSTEP)
#define MULTIPLIERS_AND_WRITERS 224

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) k0(PARAMETERS) {
  extern __shared__ u8 raw[];
  const u32 base = (shared_at(raw) + 1023) & ~1023u;
  const u32 as = base, bs = as + STAGES * A_BYTES, cs = bs + STAGES * B_BYTES, bars = cs + C_BYTES;
  auto full = [&](int s) { return bars + 8 * s; };
  auto empty = [&](int s) { return bars + 8 * (STAGES + s); };
  auto told = [&](int n) { return bars + 8 * (2 * STAGES + n % RING); };
  const u32 ring = bars + 8 * (2 * STAGES + RING);
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      bar_init(full(s), 1);
      // Each warp that multiplies, in both blocks.
      bar_init(empty(s), 16);
    }
    for (int n = 0; n < RING; ++n) bar_init(told(n), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  // The n-th tile of this cluster; no tile from TILES on.
  auto tile = [&](int n) {
    bar_wait(told(n), n / RING % 2);
    u32 t;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(t) : "r"(ring + 4 * (n % RING)) : "memory");
    return t;
  };
  auto place = [&](u32 t, int& row, int& column) {
    const int band = t / (DOWN * ACROSS), rest = t - band * DOWN * ACROSS, down = min(DOWN, PAIRS - band * DOWN);
    row = (band * DOWN + rest % down) * 256 + (int)rank * 128;
    column = rest / down * WIDE;
  };

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) {
        int s = 0, parity = 1;
        u32 next = rank == 0 ? atomicAdd(tickets, 1) : 0;
        for (int n = 0;; ++n) {
          if (rank == 0) {
            for (int block = 0; block < 2; ++block) send(ring + 4 * (n % RING), told(n), next, block);
          }
          bar_expect(told(n), 4);
          const u32 t = tile(n);
          if (t >= TILES) {
            // Whoever asks last of all leaves the counter as it was.
            if (rank == 0 && t == TILES + gridDim.x / 2 - 1) atomicExch(tickets, 0);
            break;
          }
          if (rank == 0) next = atomicAdd(tickets, 1);
          int row, column;
          place(t, row, column);
          for (int k = 0; k < DEPTH; ++k) {
            bar_wait(empty(s), parity);
            bar_expect(full(s), A_BYTES + B_BYTES);
            tile_load(as + s * A_BYTES, &a, k * KSTEP, row, full(s));
#if PRODUCTS == 2
            tile_send(bs + s * B_BYTES + rank * (B_BYTES / 2), rank ? &b1 : &b0, k * KSTEP, column, full(s));
#elif TB
            tile_send(bs + s * B_BYTES + rank * (B_BYTES / 2), &b0, k * KSTEP, column + rank * 128, full(s));
#else
            for (int part = rank * 2; part < rank * 2 + 2; ++part)
              tile_send(bs + s * B_BYTES + part * (B_BYTES / 4), &b0, column + part * 64, k * KSTEP, full(s));
#endif
            if (++s == STAGES) s = 0, parity ^= 1;
          }
        }
      }
    } else {
      const int warp = threadIdx.x / 32 - 1, vector = lane % VECTORS;
      // Both halves of the rounded tile are free.
      named_arrive<MULTIPLIERS_AND_WRITERS>(3);
      named_arrive<MULTIPLIERS_AND_WRITERS>(4);
      for (int n = 0;; ++n) {
        const u32 t = tile(n);
        if (t >= TILES) break;
        int row, column;
        place(t, row, column);
        column += vector * 8;
        for (int half = 0; half < 2; ++half) {
          auto line = [&](int j) { return half * 64 + (j * 3 + warp) * ROWS + lane / VECTORS; };
          auto is_mine = [&](int j) { return (j * 3 + warp) * ROWS < 64 && row + line(j) < M && column < N; };
          for (int j = 0; j < (64 / ROWS + 2) / 3; j += AHEAD) {
            READ_AHEAD
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
              if (!is_mine(j + k)) continue;
              [[maybe_unused]] const IDX i = (IDX)(row + line(j + k)) * N + column;
              TAKE
            }
            if (j == 0) named_wait<MULTIPLIERS_AND_WRITERS>(1 + half);
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
              if (!is_mine(j + k)) continue;
              const IDX i = (IDX)(row + line(j + k)) * N + column;
              const u32 at = cs + line(j + k) * 512;
              const int swizzle = line(j + k) & 7;
              const Pack<T, 8> made0 = staged(at + ((vector ^ swizzle) << 4));
#if PRODUCTS == 2
              const Pack<T, 8> made1 = staged(at + (((vector + VECTORS) ^ swizzle) << 4));
#endif
              BODY
            }
          }
          named_arrive<MULTIPLIERS_AND_WRITERS>(3 + half);
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 192;");
    const int half = group - 1, warp = threadIdx.x / 32 % 4;
    float d[128];
    int s = 0, parity = 0;
    for (int n = 0;; ++n) {
      if (tile(n) >= TILES) break;
      for (int k = 0; k < DEPTH; ++k) {
        bar_wait(full(s), parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        const u64 da = described(as + s * A_BYTES + half * (A_BYTES / 2), 16, 1024);
#if TB
        const u64 db = described(bs + s * B_BYTES, 16, 1024);
        const int step = 2;
#else
        const u64 db = described(bs + s * B_BYTES, B_BYTES / 4, 1024);
        const int step = 128;
#endif
#pragma unroll
        for (int q = 0; q < KSTEP / 16; ++q) multiply(d, da + q * 2, db + q * step, (k | q) != 0);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (lane < 2) bar_arrive(empty(s), lane);
        if (++s == STAGES) s = 0, parity ^= 1;
      }
      named_wait<MULTIPLIERS_AND_WRITERS>(3 + half);
      const int part = lane / 8, line = half * 64 + warp * 16 + part % 2 * 8 + lane % 8;
      const u32 at = cs + line * 512;
#pragma unroll
      for (int j = 0; j < 32; j += 2) {
        const float* v = d + 4 * j;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at + (((j + part / 2) ^ (line & 7)) << 4)),
                     "r"(rounded2(v[0], v[1])), "r"(rounded2(v[2], v[3])), "r"(rounded2(v[4], v[5])), "r"(rounded2(v[6], v[7]))
                     : "memory");
      }
      named_arrive<MULTIPLIERS_AND_WRITERS>(1 + half);
    }
  }
  // Neither block leaves while the other one may still send to it.
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
