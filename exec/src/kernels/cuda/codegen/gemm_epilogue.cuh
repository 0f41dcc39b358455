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

struct alignas(64) Map { u64 words[16]; };

DEV u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV void bar_init(u32 bar, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(n)); }
DEV void bar_expect(u32 bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEV void bar_wait(u32 bar, int parity) {
  asm volatile("{\n.reg .pred p;\nW: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n@p bra.uni D;\nbra.uni W;\nD:\n}" ::"r"(bar), "r"(parity) : "memory");
}
// In another block of the cluster. What is released is what tensor cores have read, which is done when they are waited for: no fence.
DEV void bar_arrive(u32 bar, int block) {
  asm volatile("{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [r];\n}" ::"r"(bar), "r"(block) : "memory");
}
// Sends a word to a block of the cluster, whose barrier counts its bytes.
DEV void send(u32 to, u32 bar, u32 word, int block) {
  asm volatile("{\n.reg .b32 r, s;\nmapa.shared::cluster.u32 r, %0, %3;\nmapa.shared::cluster.u32 s, %1, %3;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [r], %2, [s];\n}" ::"r"(to), "r"(bar), "r"(word), "r"(block) : "memory");
}
DEV void tile_load(u32 to, const Map* map, int x, int y, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(y) : "memory");
}
DEV void tile_send(u32 to, const Map* map, int x, int y, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(y), "h"((unsigned short)3) : "memory");
}
// A tile in shared memory whose lines of 128 bytes are swizzled; distances of its parts along rows and down.
DEV u64 described(u32 at, int along, int down) {
  return (u64)((at & 0x3FFFF) >> 4) | (u64)(along >> 4) << 16 | (u64)(down >> 4) << 32 | 1ull << 62;
}
DEV u32 rounded2(float a, float b) {
  const float two[2] = {a, b};
  Pack<T, 2> t;
  pack(two, t);
  return *reinterpret_cast<u32*>(&t);
}
DEV Pack<T, 8> staged(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return *reinterpret_cast<Pack<T, 8>*>(&v);
}
template <int N_> DEV void named_wait(int bar) { asm volatile("bar.sync %0, %1;" ::"r"(bar), "n"(N_) : "memory"); }
template <int N_> DEV void named_arrive(int bar) { asm volatile("bar.arrive %0, %1;" ::"r"(bar), "n"(N_) : "memory"); }
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
