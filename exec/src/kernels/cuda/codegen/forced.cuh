// Choices of columns that depend on no score; `DrawnColumns` of the plan says what they are. The rows of a block are of
// one group.
#define STEP (UNIT / GROUP)
struct Columns { u32 keys[D], before[D]; };
// SplitMix64's first number of a seed.
DEV u64 drawn(u64 seed) {
  u64 z = seed + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
// Finds where the columns of a group lie, with all threads of the block. Returns the smallest start of a row.
DEV u32 place_columns(u32 data_rank, u32 group, Columns& to) {
  const u64 own = drawn(drawn(SEED ^ data_rank) ^ group);
  for (u32 c = threadIdx.x; c < D; c += 32 * WARPS) to.keys[c] = (u32)(drawn(own + 1 + c) >> 32);
  __syncthreads();
  for (u32 c = threadIdx.x; c < D; c += 32 * WARPS) {
    const u32 key = to.keys[c];
    u32 sum = 0;
    for (u32 o = 0; o < D; o++)
      if (to.keys[o] < key || to.keys[o] == key && o < c) sum += SHARES[o];
    to.before[c] = sum;
  }
  __syncthreads();
  return (u32)(drawn(own) >> 32) % STEP;
}
// The columns of a row of the group, in ascending order; every lane of the warp gets them.
DEV void forced_columns(const Columns& of, u32 first, u32 row, u32 (&chosen)[CHOICES]) {
  const u32 start = first + (row % PERIOD * (GROUP / PERIOD) + row / PERIOD) * STEP;
  u32 n = 0;
  for (u32 from = 0; from < D; from += 32) {
    const u32 c = from + threadIdx.x % 32;
    bool taken = false;
    if (c < D) {
      const u32 end = of.before[c] + (UNIT - 1u - start);
      taken = end / UNIT < (end + SHARES[c]) / UNIT;
    }
    for (u32 all = __ballot_sync(0xffffffffu, taken); all != 0 && n < CHOICES; all &= all - 1)
      chosen[n++] = from + __ffs(all) - 1;
  }
}
