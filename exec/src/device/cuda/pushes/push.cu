// Rows that ranks write into one another's memory, and the signals that say that they are there.
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Equal to `MAX_RANKS` in kernels.rs.
#define MAX_RANKS 72

// Words of a rank's signals. The word of each peer has a sector of its own. Peers write flags and
// probes; the other words are the rank's.
#define FLAG(rank) ((rank) * 8)
#define SEQUENCE 1024
#define DONE 1025
#define NEXT 1026

// The ranks that push to one another, by position.
struct Team {
  u64 signals[MAX_RANKS];
  const u32* abort;
  u32 ranks;
  u32 me;
};

// A push: `from` are rows of `width` bytes, `to` the windows of all ranks. Row `r * tokens + t` of
// `choices`, `k` of them, says whether rank `r` gets row `t` of `from`; if rows go `back`, it gets
// row `r * tokens + t`. Its window has `tokens` places for the rows of each rank.
struct Rows {
  u64 to[MAX_RANKS];
  const u8* from;
  const long long* choices;
  u64 experts;
  u32 tokens;
  u32 k;
  u32 width;
  u32 back;
};

static __device__ __forceinline__ void signal(u32* at, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

static __device__ __forceinline__ u32 look(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// Signals to all ranks that this one has come here, and waits until they have. Called by all threads
// of one block. The number of the meeting is in memory, so that a graph can be replayed. Ends early
// if the host says so: the run has failed then.
static __device__ __forceinline__ void meet(const Team& team) {
  u32* own = (u32*)team.signals[team.me];
  u32 number = own[SEQUENCE] + 1;
  for (u32 r = threadIdx.x; r < team.ranks; r += blockDim.x)
    if (r != team.me) signal((u32*)team.signals[r] + FLAG(team.me), number);
  for (u32 r = threadIdx.x; r < team.ranks; r += blockDim.x) {
    if (r == team.me) continue;
    u32 looks = 0;
    // A rank is at most one meeting ahead.
    while ((int)(look(own + FLAG(r)) - number) < 0)
      if (++looks % 64 == 0 && look(team.abort) != 0) break;
  }
  __syncthreads();
  if (threadIdx.x == 0) own[SEQUENCE] = number;
}

extern "C" __global__ void __launch_bounds__(128) meeting(const __grid_constant__ Team team) { meet(team); }

// Copies a row by a warp, with as many loads in flight as `N`.
template <typename V, int N>
static __device__ __forceinline__ void copy(const u8* from, u8* to, u32 width) {
  const V* a = (const V*)from;
  V* b = (V*)to;
  u32 n = width / sizeof(V), i = threadIdx.x % 32;
  for (; i + 32 * (N - 1) < n; i += 32 * N) {
    V v[N];
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = a[i + 32 * j];
#pragma unroll
    for (int j = 0; j < N; j++) b[i + 32 * j] = v[j];
  }
  for (; i < n; i += 32) b[i] = a[i];
}

// Rows that a warp takes at a time: four lanes look at the choices of each.
#define TAKEN 8

template <typename V>
static __device__ __forceinline__ void push(const Team& team, const Rows& rows) {
  u32* own = (u32*)team.signals[team.me];
  u32 lane = threadIdx.x % 32;
  u32 chunks = (rows.tokens + TAKEN - 1) / TAKEN;
  for (;;) {
    u32 next = 0;
    if (lane == 0) next = atomicAdd(own + NEXT, 1u);
    next = __shfl_sync(0xffffffffu, next, 0);
    if (next >= team.ranks * chunks) break;
    // Ranks take turns, and this one is the last of them: copies within the device take bandwidth
    // that NVLink does not need.
    u32 rank = (team.me + 1 + next % team.ranks) % team.ranks;
    u32 first = next / team.ranks * TAKEN;
    u32 token = first + lane / 4;
    bool chosen = false;
    if (token < rows.tokens) {
      const long long* choice = rows.choices + ((u64)rank * rows.tokens + token) * rows.k;
      for (u32 j = lane % 4; j < rows.k; j += 4) chosen |= (u64)choice[j] < rows.experts;
    }
    u32 mask = __ballot_sync(0xffffffffu, chosen);
    u64 source = (rows.back ? (u64)rank * rows.tokens : 0) + first;
    u64 place = (u64)team.me * rows.tokens + first;
    u8* window = (u8*)rows.to[rank];
    for (u32 t = 0; t < TAKEN; t++)
      if (mask >> 4 * t & 15u)
        copy<V, 8>(rows.from + (source + t) * rows.width, window + (place + t) * rows.width, rows.width);
  }
  // Rows are in place before the flag says so.
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    last = atomicAdd(own + DONE, 1u) == gridDim.x - 1;
    __threadfence_system();
  }
  __syncthreads();
  if (!last) return;
  if (threadIdx.x == 0) own[DONE] = own[NEXT] = 0;
  meet(team);
}

extern "C" __global__ void __launch_bounds__(512)
    push_vectors(const __grid_constant__ Team team, const __grid_constant__ Rows rows) {
  push<uint4>(team, rows);
}

// Rows that are not whole vectors.
extern "C" __global__ void __launch_bounds__(512)
    push_bytes(const __grid_constant__ Team team, const __grid_constant__ Rows rows) {
  push<u8>(team, rows);
}
