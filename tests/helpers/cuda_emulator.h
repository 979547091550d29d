// CPU stand-ins for the parts of CUDA C++ that TVM's generated kernels use. Every CUDA thread is a fiber; warp and
// block collectives are barriers between fibers, cp.async completes only at its wait, TMA copies some turns after they were
// asked for, shared memory starts as NaN. The blocks of a cluster run together; a remote shared address carries the block's
// rank + 1 above bit 20.
#pragma once
#include <immintrin.h>
#include <deque>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <algorithm>
#include <initializer_list>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
typedef unsigned char uchar;
#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")

struct __half_raw { unsigned short x; };
struct half {
  uint16_t bits;
  half() = default;
  half(__half_raw r) : bits(r.x) {}
  half(float f) : bits(_cvtss_sh(f, 0)) {}
  operator float() const { return _cvtsh_ss(bits); }
};
struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  nv_bfloat16(float f) {
    uint32_t u; memcpy(&u, &f, 4);
    bits = (f != f) ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
  operator float() const { uint32_t u = (uint32_t)bits << 16; float f; memcpy(&f, &u, 4); return f; }
};

struct Dim3 { int x, y, z; };
inline nv_bfloat16 __float2bfloat16_rn(float f) { return nv_bfloat16(f); }
inline half __float2half_rn(float f) { return half(f); }
namespace emu {
constexpr int kWarp = 32, kSmem = 232448;
extern unsigned char* smem;
struct Copy { void* dst; const void* src; unsigned bytes, zeros; };
enum State { kRun, kWarpWait, kBlockWait, kClusterWait, kGridWait, kDone };
struct Fiber {
  void* sp; unsigned char* stack; State state; Dim3 tid; int index, rank, stores; bool arrived;
  std::vector<std::vector<Copy>> groups; std::vector<Copy> open;
  const void* slot;
};
extern Fiber* cur;
extern std::vector<Fiber> fibers;
extern Dim3 block_idx, grid_dim;
extern int cluster;                       // blocks of a cluster, neighbours along x
void wait(State s);
inline Fiber& lane(int i) { return fibers[cur->index / kWarp * kWarp + i]; }
inline int lane_id() { return cur->index % kWarp; }
template <class V> V exchange(V v, int from) {
  V mine = v; cur->slot = &mine; wait(kWarpWait);
  V got = (from >= 0 && from < kWarp) ? *(const V*)lane(from).slot : v;
  wait(kWarpWait);
  return got;
}
inline float bf(uint32_t u) { u <<= 16; float f; memcpy(&f, &u, 4); return f; }
template <bool BF> float elem(uint32_t word, int hi) {
  uint16_t h = hi ? word >> 16 : word & 0xffff;
  return BF ? bf(h) : _cvtsh_ss(h);
}
template <bool BF> inline uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r = 0;
  for (int i = 0; i < 2; ++i) {
    float v = elem<BF>(a, i) * elem<BF>(b, i) + elem<BF>(c, i);       // products of powers of two: nothing to round
    r |= (uint32_t)(BF ? nv_bfloat16(v).bits : half(v).bits) << 16 * i;
  }
  return r;
}
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t s = selector >> 4 * i & 15, byte = bytes >> 8 * (s & 7) & 255;
    r |= (s & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;       // the sign of a byte, or the byte
  }
  return r;
}
struct MmaRegs { uint32_t a[4], b[2]; };
template <bool BF> void mma(float* d, MmaRegs r, const float* c) {
  cur->slot = &r; wait(kWarpWait);
  int g = lane_id() / 4, t = lane_id() % 4;
  double acc[4] = {c[0], c[1], c[2], c[3]};
  for (int k = 0; k < 16; ++k) {
    int q = (k % 8) / 2, hi = k % 2, up = k / 8;
    for (int i = 0; i < 2; ++i) {
      const MmaRegs* ra = (const MmaRegs*)lane(g * 4 + q).slot;
      float a = elem<BF>(ra->a[up * 2 + i], hi);
      for (int j = 0; j < 2; ++j) {
        const MmaRegs* rb = (const MmaRegs*)lane((t * 2 + j) * 4 + q).slot;
        acc[i * 2 + j] += (double)a * elem<BF>(rb->b[up], hi);
      }
    }
  }
  wait(kWarpWait);
  for (int i = 0; i < 4; ++i) d[i] = (float)acc[i];
}
inline float tf32(uint32_t u) { u &= 0xffffe000; float f; memcpy(&f, &u, 4); return f; }
template <int K> void mma_tf32(float* d, MmaRegs r, const float* c) {     // m16n8kK; the low bits of operands are not read
  cur->slot = &r; wait(kWarpWait);
  int g = lane_id() / 4, t = lane_id() % 4;
  double acc[4] = {c[0], c[1], c[2], c[3]};
  for (int k = 0; k < K; ++k)
    for (int i = 0; i < 2; ++i)
      for (int j = 0; j < 2; ++j)
        acc[i * 2 + j] += (double)tf32(((const MmaRegs*)lane(g * 4 + k % 4).slot)->a[k / 4 * 2 + i]) *
                          tf32(((const MmaRegs*)lane((t * 2 + j) * 4 + k % 4).slot)->b[k / 4]);
  wait(kWarpWait);
  for (int i = 0; i < 4; ++i) d[i] = (float)acc[i];
}
template <bool TRANS> void ldmatrix4(uint32_t* r, uint32_t addr) {
  cur->slot = smem + addr; wait(kWarpWait);
  int l = lane_id();
  for (int m = 0; m < 4; ++m) {
    uint16_t v[2];
    for (int j = 0; j < 2; ++j) {
      int row = TRANS ? (l % 4) * 2 + j : l / 4, col = TRANS ? l / 4 : (l % 4) * 2 + j;
      const unsigned char* p = (const unsigned char*)lane(m * 8 + row).slot;
      if ((uintptr_t)(p - smem) % 16) { fprintf(stderr, "ldmatrix address not 16-byte aligned\n"); abort(); }
      memcpy(&v[j], p + col * 2, 2);
    }
    r[m] = v[0] | (uint32_t)v[1] << 16;
  }
  wait(kWarpWait);
}
// mbarrier: phase, arrivals to come, arrivals of a phase and bytes to come in one 64-bit word of shared memory
unsigned char* shared_of(int rank);
inline unsigned char* at(uint32_t addr) { return addr >> 20 ? shared_of((addr >> 20) - 1) + (addr & 0xfffff) : smem + addr; }
struct Barrier { uint16_t phase : 1, pending : 15; uint16_t count; int32_t bytes; };
inline Barrier& barrier(uint32_t addr) { return *(Barrier*)at(addr); }
inline void mbarrier_init(uint32_t addr, uint32_t n) { barrier(addr) = {0, (uint16_t)n, (uint16_t)n, 0}; }
inline void mbarrier_settle(Barrier& b) {
  if (b.pending == 0 && b.bytes == 0) { b.pending = b.count; b.phase ^= 1; }
}
inline void mbarrier_arrive(uint32_t addr, int bytes = 0) {
  Barrier& b = barrier(addr);
  if (b.pending == 0) { fprintf(stderr, "more arrivals than an mbarrier expects\n"); abort(); }
  b.bytes += bytes; --b.pending;
  mbarrier_settle(b);
}
inline void mbarrier_wait(uint32_t addr, uint32_t parity) {
  long tries = 0;
  while ((barrier(addr).phase & 1) == (parity & 1)) {
    if (++tries > 2000000) { fprintf(stderr, "mbarrier wait never ends\n"); abort(); }
    wait(kRun);
  }
}
struct Named { int arrived, turn; };
extern Named* named;
inline int named_arrive(int id, int count) {
  Named& b = named[id];
  int turn = b.turn;
  if (++b.arrived == count) { b.arrived = 0; ++b.turn; }
  return turn;
}
inline void named_sync(int id, int count) {
  int turn = named_arrive(id, count);
  for (long tries = 0; named[id].turn == turn; wait(kRun))
    if (++tries > 2000000) { fprintf(stderr, "bar.sync %d never ends\n", id); abort(); }
}
// One operand element of wgmma by the canonical 128-byte-swizzled layouts; descriptor fields in 16-byte units.
template <bool BF> float operand(uint64_t desc, bool k_major, int mn, int k) {
  uint64_t start = (desc & 0x3fff) * 16, leading = (desc >> 16 & 0x3fff) * 16, stride = (desc >> 32 & 0x3fff) * 16;
  if (desc >> 62 != 1) { fprintf(stderr, "only 128-byte swizzle is emulated\n"); abort(); }
  uint64_t at = k_major ? start + mn % 8 * 128 + mn / 8 * stride + k * 2
                        : start + mn % 64 * 2 + mn / 64 * leading + k % 8 * 128 + k / 8 * stride;
  at ^= (at >> 7 & 7) << 4;
  if (at + 2 > kSmem) { fprintf(stderr, "wgmma operand outside shared memory\n"); abort(); }
  uint16_t v; memcpy(&v, smem + at, 2);
  return BF ? bf(v) : _cvtsh_ss(v);
}
template <bool BF, int N> void wgmma(float* c, const uint32_t* a, uint64_t a_desc, uint64_t b_desc, bool add, bool a_trans,
                                     bool b_trans) {
  int g = lane_id() / 4, t = lane_id() % 4, warp = cur->tid.x / kWarp % 4;
  float left[2][16];
  if (a) {
    cur->slot = a; wait(kWarpWait);
    for (int k = 0; k < 16; ++k) for (int i = 0; i < 2; ++i)
      left[i][k] = elem<BF>(((const uint32_t*)lane(g * 4 + k % 8 / 2).slot)[k / 8 * 2 + i], k % 2);
    wait(kWarpWait);
  } else {
    for (int k = 0; k < 16; ++k) for (int i = 0; i < 2; ++i)
      left[i][k] = operand<BF>(a_desc, !a_trans, warp * 16 + g + 8 * i, k);
  }
  for (int n = 0; n < N / 8; ++n) for (int j = 0; j < 2; ++j) {
    float right[16];
    for (int k = 0; k < 16; ++k) right[k] = operand<BF>(b_desc, !b_trans, n * 8 + t * 2 + j, k);
    for (int i = 0; i < 2; ++i) {
      float s = add ? c[n * 4 + i * 2 + j] : 0;
      for (int k = 0; k < 16; ++k) s += left[i][k] * right[k];
      c[n * 4 + i * 2 + j] = s;
    }
  }
}
inline float e4m3(unsigned c) {
  if ((c & 127) == 127) return CUDART_NAN_F;
  int e = c >> 3 & 15;
  float v = e ? ldexpf(1 + (c & 7) / 8.0f, e - 7) : ldexpf((c & 7) / 8.0f, -6);
  return c & 128 ? -v : v;
}
// To the nearest, ties to the even code, saturating.
inline unsigned to_e4m3(float x) {
  if (x != x) return 0x7f;
  unsigned sign = signbit(x) ? 128 : 0, best = 0;
  for (unsigned c = 1; c < 127; ++c) {
    float near = fabsf(e4m3(best) - fabsf(x)), now = fabsf(e4m3(c) - fabsf(x));
    if (now < near || (now == near && c % 2 == 0)) best = c;
  }
  return sign | best;
}
// Bytes of a K-major operand with the swizzle of 128 or 64 bytes.
inline float operand8(uint64_t desc, int mn, int k) {
  uint64_t start = (desc & 0x3fff) * 16, stride = (desc >> 32 & 0x3fff) * 16, mode = desc >> 62;
  if (mode != 1 && mode != 2) { fprintf(stderr, "only swizzles of 128 and 64 bytes are emulated\n"); abort(); }
  uint64_t at = start + mn % 8 * (mode == 1 ? 128 : 64) + mn / 8 * stride + k;
  at ^= (at >> 7 & (mode == 1 ? 7 : 3)) << 4;
  if (at >= kSmem) { fprintf(stderr, "wgmma operand outside shared memory\n"); abort(); }
  return e4m3(smem[at]);
}
template <int N> void wgmma8(float* c, uint64_t a_desc, uint64_t b_desc, bool add) {
  int g = lane_id() / 4, t = lane_id() % 4, warp = cur->tid.x / kWarp % 4;
  float left[2][32];
  for (int k = 0; k < 32; ++k) for (int i = 0; i < 2; ++i) left[i][k] = operand8(a_desc, warp * 16 + g + 8 * i, k);
  for (int n = 0; n < N / 8; ++n) for (int j = 0; j < 2; ++j) {
    float right[32];
    for (int k = 0; k < 32; ++k) right[k] = operand8(b_desc, n * 8 + t * 2 + j, k);
    for (int i = 0; i < 2; ++i) {
      float s = add ? c[n * 4 + i * 2 + j] : 0;
      for (int k = 0; k < 32; ++k) s += left[i][k] * right[k];
      c[n * 4 + i * 2 + j] = s;
    }
  }
}
inline uint32_t movmatrix(uint32_t v) {
  uint32_t mine = v, r = 0;
  cur->slot = &mine; wait(kWarpWait);
  int g = lane_id() / 4, t = lane_id() % 4;
  for (int j = 0; j < 2; ++j) {                          // element (row g, column 2t + j) of the transpose
    uint32_t word = *(const uint32_t*)lane((t * 2 + j) * 4 + g / 2).slot;
    r |= (g % 2 ? word >> 16 : word & 0xffff) << (16 * j);
  }
  wait(kWarpWait);
  return r;
}
inline void cp_async(uint32_t dst, const void* src, unsigned bytes, unsigned valid) {
  if (dst % bytes || (uintptr_t)src % bytes) { fprintf(stderr, "cp.async not aligned\n"); abort(); }
  cur->open.push_back({smem + dst, src, valid, bytes - valid});
}
inline void commit_group() { cur->groups.push_back(cur->open); cur->open.clear(); }
inline void wait_group(size_t left) {
  while (cur->groups.size() > left) {
    for (auto& c : cur->groups.front()) {
      if (c.bytes) memcpy(c.dst, c.src, c.bytes);
      memset((char*)c.dst + c.bytes, 0, c.zeros);
    }
    cur->groups.erase(cur->groups.begin());
  }
}
inline void stmatrix4(uint32_t addr, const uint32_t* r) {
  cur->slot = smem + addr; wait(kWarpWait);
  for (int m = 0; m < 4; ++m) memcpy((char*)lane(m * 8 + lane_id() / 4).slot + lane_id() % 4 * 4, &r[m], 4);
  wait(kWarpWait);
}
// TMA: boxes of elements of 2 or 4 bytes in up to five dimensions, the first one contiguous, swizzled by the address bits of
// shared memory, zeros outside.
struct Map { unsigned char* data; int64_t rank, sizes[5], strides[5], box[5], swizzle; };       // strides in bytes
// A copy under way: a box of a map, or `bytes` from `from`.
struct Tma {
  unsigned char* base; uint32_t offset; Map map; int at[5]; Barrier* done; Fiber* storer; const void* from; uint32_t bytes;
};
extern std::deque<Tma> in_flight;
inline void tma_finish(const Tma& c) {
  if (c.from) { memcpy(c.base + c.offset, c.from, c.bytes); c.done->bytes -= c.bytes; mbarrier_settle(*c.done); return; }
  const Map& m = c.map;
  const int bits = m.swizzle ? (1 << m.swizzle) - 1 : 0, size = m.strides[0];
  int64_t count = 1;
  for (int d = 0; d < m.rank; ++d) count *= m.box[d];
  for (int64_t i = 0; i < count; ++i) {
    uint32_t a = c.offset + i * size;
    a ^= (a >> 7 & bits) << 4;
    bool inside = true;
    unsigned char* global = m.data;
    for (int64_t d = 0, rest = i; d < m.rank; rest /= m.box[d++]) {
      int64_t x = c.at[d] + rest % m.box[d];
      inside &= x >= 0 && x < m.sizes[d];
      global += x * m.strides[d];
    }
    if (c.storer) { if (inside) memcpy(global, c.base + a, size); }
    else if (inside) memcpy(c.base + a, global, size);
    else memset(c.base + a, 0, size);
  }
  if (c.storer) { --c.storer->stores; return; }
  c.done->bytes -= count * size;
  mbarrier_settle(*c.done);
}
inline Tma tma_at(const void* map, std::initializer_list<int> at, unsigned char* base, uint32_t offset) {
  const Map* m = (const Map*)map;
  bool bad = (int64_t)at.size() != m->rank || offset % 128 || (m->swizzle && m->box[0] * m->strides[0] > 16 << m->swizzle);
  for (int d = 0; d < m->rank; ++d) bad |= m->box[d] > 256 || (d > 0 && m->strides[d] % 16 != 0);
  if (bad) { fprintf(stderr, "bad TMA box\n"); abort(); }
  Tma copy = {base, offset, *m};
  std::copy(at.begin(), at.end(), copy.at);
  return copy;
}
inline void tma_load(uint32_t dst, const void* map, std::initializer_list<int> at, uint32_t bar, unsigned mask) {
  for (int rank = 0; rank < cluster; ++rank) if (mask >> rank & 1) {
    in_flight.push_back(tma_at(map, at, shared_of(rank), dst));
    in_flight.back().done = (Barrier*)(shared_of(rank) + bar);
  }
}
inline void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  if (dst % 16 || (uintptr_t)src % 16 || bytes % 16) { fprintf(stderr, "bulk copy not aligned\n"); abort(); }
  in_flight.push_back({smem, dst, {}, {}, (Barrier*)(smem + bar), nullptr, src, bytes});
}
inline void tma_store(const void* map, std::initializer_list<int> at, uint32_t src) {
  ++cur->stores;
  in_flight.push_back(tma_at(map, at, smem, src));
  in_flight.back().storer = cur;
}
inline void tma_wait(int left) { while (cur->stores > left) wait(kRun); }
// distributed shared memory
inline uint32_t mapa(uint32_t addr, uint32_t rank) {
  if ((int)rank >= cluster) { fprintf(stderr, "mapa: block %u of a cluster of %d\n", rank, cluster); abort(); }
  return addr | (rank + 1) << 20;
}
inline unsigned char* remote(uint32_t addr, unsigned bytes) {
  if (!(addr >> 20) || addr % bytes || (addr & 0xfffff) + bytes > kSmem) {
    fprintf(stderr, "bad address %x in shared::cluster\n", addr); abort();
  }
  return shared_of((addr >> 20) - 1) + (addr & 0xfffff);
}
extern bool any_late;
inline void grid_wait() { if (any_late) wait(kGridWait); }
inline void cluster_arrive() {
  if (cur->arrived) { fprintf(stderr, "barrier.cluster.arrive twice without a wait\n"); abort(); }
  cur->arrived = true;
}
inline void cluster_wait() {
  if (!cur->arrived) { fprintf(stderr, "barrier.cluster.wait without an arrive\n"); abort(); }
  wait(kClusterWait);
}
}  // namespace emu

#define threadIdx (emu::cur->tid)
#define blockIdx (emu::block_idx)
#define gridDim (emu::grid_dim)
typedef emu::Map CUtensorMap;
inline void __syncthreads() { emu::wait(emu::kBlockWait); }
inline void __syncwarp(unsigned = ~0u) { emu::wait(emu::kWarpWait); }
inline void __threadfence() {}
template <class V> V __shfl_xor_sync(unsigned, V v, int m, int = 32) { return emu::exchange(v, emu::lane_id() ^ m); }
template <class V> V __shfl_sync(unsigned, V v, int l, int = 32) { return emu::exchange(v, l & 31); }
template <class V> V __shfl_up_sync(unsigned, V v, int d, int = 32) { return emu::exchange(v, emu::lane_id() - d); }
template <class V> V __shfl_down_sync(unsigned, V v, int d, int = 32) { return emu::exchange(v, emu::lane_id() + d); }
inline int __reduce_add_sync(unsigned, int v) {
  for (int i = 1; i < 32; i *= 2) v += emu::exchange(v, emu::lane_id() ^ i);
  return v;
}
inline int __reduce_max_sync(unsigned, int v) {
  for (int i = 1; i < 32; i *= 2) { int other = emu::exchange(v, emu::lane_id() ^ i); v = other > v ? other : v; }
  return v;
}
inline unsigned __ballot_sync(unsigned, int p) {
  int mine = p; emu::cur->slot = &mine; emu::wait(emu::kWarpWait);
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (*(const int*)emu::lane(i).slot ? 1u : 0u) << i;
  emu::wait(emu::kWarpWait);
  return r;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
inline float __half2float(half h) { return h; }
inline unsigned __umulhi(unsigned a, unsigned b) { return ((uint64_t)a * b) >> 32; }
template <class A, class B> auto max(A a, B b) -> typename std::common_type<A, B>::type { return a != a ? b : (b != b ? a : (a > b ? a : b)); }
template <class A, class B> auto min(A a, B b) -> typename std::common_type<A, B>::type { return a != a ? b : (b != b ? a : (a < b ? a : b)); }
template <class V, class U> V atomicAdd(V* p, U v) { V old = *p; *p = old + v; return old; }
inline unsigned atomicInc(unsigned* p, unsigned most) { unsigned old = *p; *p = old >= most ? 0 : old + 1; return old; }
inline int __syncthreads_or(int v) {
  int mine = v, any = 0; emu::cur->slot = &mine; emu::wait(emu::kBlockWait);
  for (auto& f : emu::fibers) any |= *(const int*)f.slot;
  emu::wait(emu::kBlockWait);
  return any != 0;
}
template <class V, class U> V atomicMax(V* p, U v) { V old = *p; *p = old > (V)v ? old : (V)v; return old; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
