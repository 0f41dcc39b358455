// Tensor copies, barriers and tensor cores of Hopper, as kernels that multiply tiles in shared memory use them.
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
// The same of matrix z of a stack.
DEV void tile_load(u32 to, const Map* map, int x, int y, int z, u32 bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z) : "memory");
}
DEV void tile_send(u32 to, const Map* map, int x, int y, int z, u32 bar) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to), "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"((unsigned short)3) : "memory");
}
// Writes a box from shared memory, as a group of copies of its own thread.
DEV void tile_store(const Map* map, u32 from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from), "r"(x), "r"(y), "r"(z) : "memory");
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
