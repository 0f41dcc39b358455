// One matmul per expert on Hopper's tensor cores, with float32 sums: `c[r] = a[r] b[e]` for the rows r of each expert e, or with WEIGHT_GRAD
// `c[e] = a[rows of e]^T b[rows of e]`. Only the device knows how many rows an expert has. Factors have 16 bits, or 8 (CODES): then the inner
// dimension of both is contiguous, so that those of a weight gradient come transposed, and sums are multiplied by the reciprocals of scales.
//
// The two blocks of a cluster work on neighboring tiles of 128 rows and 256 columns. Most of these have the same columns, of which each
// block loads half and sends it to both. An expert with an odd number of tiles below one another has the last ones side by side; of these
// the rows are sent. The first warp loads, a step of KSTEP ahead of another as long as there is room. Two groups of four warps multiply,
// each 64 rows; when a tile is done they round it into shared memory and go on with the next one. Other warps of the first group write it:
// the rows up to the expert's end, or the whole by a tensor copy, which ends at the matrix's edges. A weight gradient in float32 (FLOAT_GRAD)
// is not rounded: there is room for a quarter of its tile. Which tile is next is asked of a counter, since a multiprocessor may be busy with
// something else at first. Sums have the order of the inner dimension. Tensor cores add up products of 8-bit numbers with fewer bits than float32 has:
// with PROMOTE, only those of a step, which are then added up in float32.
//
// With EPILOGUE, the warps that write do the elementwise code behind the matmul. That takes longer than to write: there is room for a
// whole rounded tile, and a step less to load ahead. With PAIRED, it combines the two halves of the result's columns: of each, a tile
// has the same 128, in parts that alternate.
#define KSTEP (CODES ? 128 : 64)
#define STAGES (EPILOGUE ? 3 : 4)
// Both factors come in parts of 64 rows or columns of a result: 128 bytes of each.
#define PART (64 * 128)
#define A_BYTES (2 * PART)
#define B_BYTES (4 * PART)
// A tile is rounded in two rounds, each of half of the columns, or in one: vectors of a row in shared memory. In float32, it is stored in four:
// with fewer, larger rounds, there would be room for three stages only, which is slower.
#define UNITS (EPILOGUE ? 32 : 16)
// Numbers of a vector.
#define VECTOR (FLOAT_GRAD ? 4 : 8)
#define C_BYTES (128 * UNITS * 16)
// Tiles of a block's loader are never as many ahead of its writers.
#define RING 8
// Tiles side by side, and how many are below one another in a band: a band's rows stay in the second-level cache.
#define ACROSS ((N + 255) / 256)
// Columns of a tile of what is written, and of all tiles.
#define WIDE (PAIRED ? 128 : 256)
#define COLUMNS (PAIRED ? N / 2 : N)
#define BAND 16
#define WRITERS (WEIGHT_GRAD ? 1 : 3)
#define MULTIPLIERS_AND_WRITERS (128 + WRITERS * 32)

// A thread that multiplies has the sums of 256 columns, and with PROMOTE those of a step over 128.
#define LOADERS_REGISTERS (PROMOTE ? 72 : 120)
#define MULTIPLIERS_REGISTERS (PROMOTE ? 216 : 192)

// Tiles of clusters in a result of `high` tiles below one another. Two columns of tiles have as many as one of them is high.
DEV constexpr u32 tiles(u32 high) { return ACROSS / 2 * high + ACROSS % 2 * ((high + 1) / 2); }

// A tile: the expert, rows and columns from here on; the end of its rows; whether the cluster's tiles are side by side.
struct Tile {
  u32 expert, row, column, end;
  bool beside;
  // Rows of the factors, and steps over the inner dimension.
  u32 first, inner, depth;
  // Numbers at the start of the inner dimension that are another expert's: a tensor copy of lines of rows starts at a multiple of 16 bytes.
  u32 skipped;
};
// The t-th tile of a block, of a result of `high` tiles below one another: its place, counted in tiles.
DEV void divide(u32 t, u32 high, u32 rank, Tile& to) {
  const u32 band = t / tiles(BAND), at = t - band * tiles(BAND), down = min(BAND, high - band * BAND), pairs = down / 2;
  // Of two columns, but the last may have one.
  const u32 group = min(at / down, ACROSS / 2u), i = at - group * down, wide = group == ACROSS / 2 ? 1 : 2;
  to.beside = i >= wide * pairs;
  to.row = band * BAND + (to.beside ? down - 1 : i % pairs * 2 + rank);
  to.column = group * 2 + (to.beside ? rank : i / pairs);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) k0(PARAMETERS) {
  extern __shared__ __align__(1024) u8 raw[];
  // The first tile of each expert, and the number of tiles.
  u32* firsts = reinterpret_cast<u32*>(raw + STAGES * (A_BYTES + B_BYTES) + C_BYTES + 256);
  const u32 as = shared_at(raw), bs = as + STAGES * A_BYTES, cs = bs + STAGES * B_BYTES, bars = cs + C_BYTES;
  auto full = [&](int s) { return bars + 8 * s; };
  auto empty = [&](int s) { return bars + 8 * (STAGES + s); };
  auto told = [&](int n) { return bars + 8 * (2 * STAGES + n % RING); };
  const u32 ring = bars + 8 * (2 * STAGES + RING);
  // A vector of a rounded tile: of a half, in parts of 64 columns, in lines of 128 bytes that are swizzled.
  auto unit_at = [&](int half, int line, int unit) { return cs + half * (C_BYTES / 2) + unit / 8 * PART + line * 128 + ((unit % 8 ^ line % 8) << 4); };
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
  // A thread of a warp has adjacent experts.
  if (threadIdx.x < 32) {
    constexpr u32 EACH = (EXPERTS + 31) / 32;
    auto count = [&](u32 e) { return tiles(((WEIGHT_GRAD ? M : (u32)(OFFSETS[e + 1] - OFFSETS[e])) + 127) / 128); };
    u32 mine = 0;
    for (u32 e = lane * EACH; e < (lane + 1) * EACH && e < EXPERTS; e++) mine += count(e);
    u32 sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const u32 before = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += before;
    }
    u32 first = sum - mine;
    for (u32 e = lane * EACH; e < (lane + 1) * EACH && e < EXPERTS; e++) {
      firsts[e] = first;
      first += count(e);
    }
    if (lane == 31) firsts[EXPERTS] = sum;
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  const u32 total = firsts[EXPERTS];
  // The n-th tile of this cluster; no tile from `total` on.
  auto tile = [&](int n) {
    bar_wait(told(n), n / RING % 2);
    u32 t;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(t) : "r"(ring + 4 * (n % RING)) : "memory");
    return t;
  };
  // Tiles of a cluster come in ascending order: the search goes on from the expert of the last.
  auto place = [&](u32 t, u32 expert) {
    while (firsts[expert + 1] <= t) expert++;
    const u32 start = (u32)OFFSETS[expert], rows = (u32)OFFSETS[expert + 1] - start;
    Tile p;
    p.expert = expert;
    divide(t - firsts[expert], ((WEIGHT_GRAD ? M : rows) + 127) / 128, rank, p);
    p.row *= 128;
    p.column *= WIDE;
    p.end = WEIGHT_GRAD ? M : rows;
    p.skipped = WEIGHT_GRAD && CODES ? start % 16 : 0;
    p.first = start - p.skipped;
    p.inner = WEIGHT_GRAD ? rows + p.skipped : K;
    // An expert without rows has a step of zeros.
    p.depth = max((p.inner + KSTEP - 1) / KSTEP, 1u);
    return p;
  };

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADERS_REGISTERS));
    if (threadIdx.x < 32) {
      if (threadIdx.x == 0) {
        int s = 0, parity = 1;
        u32 next = 0, expert = 0;
        auto tell = [&](int n, u32 t) {
          for (int block = 0; block < 2; ++block) send(ring + 4 * (n % RING), told(n), t, block);
        };
        if (rank == 0) tell(0, atomicAdd(tickets, 1));
        for (int n = 0;; ++n) {
          bar_expect(told(n), 4);
          const u32 t = tile(n);
          if (t >= total) {
            // The last of all to ask leaves the counter as it was.
            if (rank == 0 && t == total + gridDim.x / 2 - 1) atomicExch(tickets, 0);
            break;
          }
          if (rank == 0) next = atomicAdd(tickets, 1);
          const Tile p = place(t, expert);
          expert = p.expert;
          const int own_a = p.beside ? rank : 0, parts_a = p.beside ? 1 : 2, own_b = p.beside ? 0 : rank * 2, parts_b = p.beside ? 4 : 2;
          for (u32 k = 0; k < p.depth; ++k) {
            bar_wait(empty(s), parity);
            bar_expect(full(s), A_BYTES + B_BYTES);
            for (int i = own_a; i < own_a + parts_a; ++i) {
              const u32 to = as + s * A_BYTES + i * PART;
#if WEIGHT_GRAD
              const int outer = p.row + i * 64, inner = p.first + k * KSTEP, x = CODES ? inner : outer, y = CODES ? outer : inner;
#else
              const int x = k * KSTEP, y = p.first + p.row + i * 64;
#endif
              if (p.beside) tile_send(to, &a, x, y, full(s));
              else tile_load(to, &a, x, y, full(s));
            }
            for (int i = own_b; i < own_b + parts_b; ++i) {
              const u32 to = bs + s * B_BYTES + i * PART;
#if WEIGHT_GRAD
              const int outer = p.column + i * 64, inner = p.first + k * KSTEP, x = CODES ? inner : outer, y = CODES ? outer : inner;
              if (p.beside) tile_load(to, &b, x, y, full(s));
              else tile_send(to, &b, x, y, full(s));
#else
              const int at = PAIRED ? p.column + i / 2 * 64 + i % 2 * COLUMNS : p.column + i * 64, x = TB ? k * KSTEP : at, y = TB ? at : k * KSTEP;
              if (p.beside) tile_load(to, &b, x, y, p.expert, full(s));
              else tile_send(to, &b, x, y, p.expert, full(s));
#endif
            }
            if (k == 0 && rank == 0) tell(n + 1, next);
            if (++s == STAGES) s = 0, parity ^= 1;
          }
        }
      }
    }
    else if (threadIdx.x < 32 + WRITERS * 32) {
      const int warp = threadIdx.x / 32 - 1;
      u32 expert = 0;
      // Both halves of the rounded tile are free.
      named_arrive<MULTIPLIERS_AND_WRITERS>(3);
      named_arrive<MULTIPLIERS_AND_WRITERS>(4);
      for (int n = 0;; ++n) {
        const u32 t = tile(n);
        if (t >= total) break;
        const Tile p = place(t, expert);
        expert = p.expert;
#if WEIGHT_GRAD
        for (int unit = 0; unit < 256 / VECTOR; unit += UNITS) {
          for (int half = 0; half < 2; ++half) {
            named_wait<MULTIPLIERS_AND_WRITERS>(1 + half);
            if (lane > 0) continue;
            for (int i = 0; i < UNITS; i += 8) tile_store(&c, unit_at(half, 0, i), p.column + (unit + i) * VECTOR, p.row + half * 64, p.expert);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
          }
          // Both groups have been read: the one before the last, and the last.
          if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
          __syncwarp();
          named_arrive<MULTIPLIERS_AND_WRITERS>(3);
          if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
          __syncwarp();
          named_arrive<MULTIPLIERS_AND_WRITERS>(4);
        }
#elif EPILOGUE
        constexpr int VECTORS = WIDE / 8, LINES = 32 / VECTORS;
        const int vector = lane % VECTORS, unit = PAIRED ? vector / 8 * 16 + vector % 8 : vector;
        const u32 column = p.column + vector * 8;
        for (int half = 0; half < 2; ++half) {
          auto line = [&](int j) { return (j * WRITERS + warp) * LINES + lane / VECTORS; };
          auto is_mine = [&](int j) { return line(j) < 64 && p.row + half * 64 + line(j) < p.end && column < COLUMNS; };
          for (int j = 0; j < (64 / LINES + WRITERS - 1) / WRITERS; j += AHEAD) {
            READ_AHEAD
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
              if (!is_mine(j + k)) continue;
              [[maybe_unused]] const IDX i = ((IDX)p.first + p.row + half * 64 + line(j + k)) * COLUMNS + column;
              TAKE
            }
            if (j == 0) named_wait<MULTIPLIERS_AND_WRITERS>(1 + half);
#pragma unroll
            for (int k = 0; k < AHEAD; ++k) {
              if (!is_mine(j + k)) continue;
              const IDX i = ((IDX)p.first + p.row + half * 64 + line(j + k)) * COLUMNS + column;
              const Pack<T, 8> made0 = staged(unit_at(half, line(j + k), unit));
#if PAIRED
              const Pack<T, 8> made1 = staged(unit_at(half, line(j + k), unit + 8));
#endif
              BODY
            }
          }
          named_arrive<MULTIPLIERS_AND_WRITERS>(3 + half);
        }
#else
        T* to = RESULT + ((u64)p.first + p.row) * N;
        for (int i = 0; i < 4; ++i) {
          const int half = i % 2, unit = lane % UNITS;
          const u32 column = p.column + (i / 2 * UNITS + unit) * 8;
          named_wait<MULTIPLIERS_AND_WRITERS>(1 + half);
#pragma unroll 4
          for (int line = warp * 2 + lane / UNITS; line < 64; line += WRITERS * 2) {
            const u32 row = half * 64 + line;
            const Pack<T, 8> made = staged(unit_at(half, line, unit));
            if (p.row + row < p.end && column < N) *reinterpret_cast<Pack<T, 8>*>(to + (u64)row * N + column) = made;
          }
          named_arrive<MULTIPLIERS_AND_WRITERS>(3 + half);
        }
#endif
      }
#if WEIGHT_GRAD
      if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLIERS_REGISTERS));
    const int half = group - 1, warp = threadIdx.x / 32 % 4;
    float d[128];
#if CODES
    const float inverse = INVERSE;
#endif
    u32 expert = 0;
    int s = 0, parity = 0;
    for (int n = 0;; ++n) {
      const u32 t = tile(n);
      if (t >= total) break;
#if WEIGHT_GRAD
      const Tile p = place(t, expert);
      expert = p.expert;
      const u32 depth = p.depth;
#else
      const u32 depth = (K + KSTEP - 1) / KSTEP;
#endif
#if PROMOTE
#pragma unroll
      for (int i = 0; i < 128; ++i) d[i] = 0.0f;
#endif
      for (u32 k = 0; k < depth; ++k) {
        bar_wait(full(s), parity);
#if WEIGHT_GRAD
        // Rows around the expert's are another one's, or nobody's.
        const u32 left = p.inner - k * KSTEP, before = k == 0 ? p.skipped : 0;
        if (left < KSTEP || before > 0) {
#if CODES
          // They are bytes of lines, whose vectors are swizzled.
          auto bytes = [](int n) { return n <= 0 ? 0u : n >= 4 ? 0xffffffffu : (1u << n * 8) - 1; };
          for (u32 i = threadIdx.x - 128; i < 8 * 384; i += 256) {
            const u32 line = i / 8, unit = i % 8;
            if (unit * 16 >= before && unit * 16 + 16 <= left) continue;
            const u32 to = (line < 128 ? as + s * A_BYTES + line * 128 : bs + s * B_BYTES + (line - 128) * 128) + ((unit ^ line % 8) << 4);
#pragma unroll
            for (int word = 0; word < 4; ++word) {
              const int at = unit * 16 + word * 4;
              const u32 keep = bytes((int)min(left, (u32)KSTEP) - at) & ~bytes((int)before - at);
              u32 v = 0;
              if (keep != 0) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(to + word * 4) : "memory");
              asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + word * 4), "r"(v & keep) : "memory");
            }
          }
#else
          const u32 vectors = (KSTEP - left) * 8;
          for (u32 i = threadIdx.x - 128; i < vectors * 6; i += 256) {
            const u32 part = i / vectors, at = left * 128 + i % vectors * 16;
            const u32 to = (part < 2 ? as + s * A_BYTES + part * PART : bs + s * B_BYTES + (part - 2) * PART) + at;
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
          }
#endif
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          named_wait<256>(5);
        }
#endif
        const u64 da = described(as + s * A_BYTES + half * PART, A_COLUMNS ? PART : 16, 1024);
        const u64 db = described(bs + s * B_BYTES, B_COLUMNS ? PART : 16, 1024);
#if PROMOTE
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float step[64];
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
          for (int q = 0; q < 4; ++q) multiply(step, da + q * 2, db + side * (2 * PART / 16) + q * 2, q != 0);
          asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
          for (int i = 0; i < 64; ++i) d[side * 64 + i] += step[i];
        }
#else
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int q = 0; q < 4; ++q) multiply(d, da + q * (A_COLUMNS ? 128 : 2), db + q * (B_COLUMNS ? 128 : 2), (k | q) != 0);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
        if (lane < 2) bar_arrive(empty(s), lane);
        if (++s == STAGES) s = 0, parity ^= 1;
      }
#if CODES
#pragma unroll
      for (int i = 0; i < 128; ++i) d[i] *= inverse;
#endif
#if FLOAT_GRAD
      // Of each eight columns, four neighboring threads have a row: half a vector each.
      const int line = warp * 16 + lane / 4;
#pragma unroll
      for (int round = 0; round < 64 / UNITS; ++round) {
        named_wait<MULTIPLIERS_AND_WRITERS>(3 + half);
#pragma unroll
        for (int j = 0; j < UNITS / 2; ++j) {
          const float* v = d + 4 * (round * (UNITS / 2) + j);
#pragma unroll
          for (int down = 0; down < 2; ++down)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(unit_at(half, line + 8 * down, j * 2 + lane % 4 / 2) + lane % 2 * 8), "f"(v[2 * down]), "f"(v[2 * down + 1]) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        named_arrive<MULTIPLIERS_AND_WRITERS>(1 + half);
      }
#else
      const int line = warp * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
      for (int round = 0; round < 32 / UNITS; ++round) {
        named_wait<MULTIPLIERS_AND_WRITERS>(3 + half);
#pragma unroll
        for (int j = 0; j < UNITS; j += 2) {
          const float* v = d + 4 * (round * UNITS + j);
          asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(unit_at(half, line, j + lane / 16)),
                       "r"(rounded2(v[0], v[1])), "r"(rounded2(v[2], v[3])), "r"(rounded2(v[4], v[5])), "r"(rounded2(v[6], v[7]))
                       : "memory");
        }
        if (WEIGHT_GRAD) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        named_arrive<MULTIPLIERS_AND_WRITERS>(1 + half);
      }
#endif
    }
  }
  // Neither block leaves while the other one may still send to it.
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
