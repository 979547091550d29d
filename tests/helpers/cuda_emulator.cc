// Fiber scheduler behind cuda_emulator.h (x86-64 only).
#include "cuda_emulator.h"
namespace emu {
constexpr int kMaxCluster = 16;
alignas(1024) static unsigned char smem_storage[kMaxCluster][kSmem];
unsigned char* smem = smem_storage[0];
unsigned char* shared_of(int rank) { return smem_storage[rank]; }
Fiber* cur;
std::vector<Fiber> fibers;
Dim3 block_idx, grid_dim;
int cluster = 1;
static Named named_storage[kMaxCluster][16];
Named* named = named_storage[0];
std::deque<Tma> in_flight;
// What the kernel before this one writes: seen only after griddepcontrol.wait, until then it is 0xff.
struct Late { unsigned char* at; const unsigned char* content; size_t bytes; };
static std::vector<Late> late;
bool any_late;
static void* main_sp;
static void (*entry)(void**);
static void** entry_args;
extern "C" void emu_switch(void** save, void* load);
asm(".text\n.globl emu_switch\nemu_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
void wait(State s) { cur->state = s; emu_switch(&cur->sp, main_sp); }
static void trampoline() {
  entry(entry_args);
  if (!cur->open.empty() || !cur->groups.empty()) {
    for (auto& g : cur->groups) if (!g.empty()) { fprintf(stderr, "kernel ended with cp.async in flight\n"); abort(); }
  }
  if (cur->stores) { fprintf(stderr, "a thread ended before its TMA stores had read shared memory\n"); abort(); }
  cur->state = kDone;
  emu_switch(&cur->sp, main_sp);
  abort();
}
static bool release(size_t from, size_t to, State s) {
  bool any = false;
  for (size_t i = from; i < to; ++i) {
    if (fibers[i].state == kDone) continue;
    if (fibers[i].state != s) return false;
    any = true;
  }
  if (any) for (size_t i = from; i < to; ++i) if (fibers[i].state == s) fibers[i].state = kRun;
  return any;
}
// Threads that wait for the same cluster barrier, among all of the cluster; it has been passed once all that still run
// have come.
static bool release_all(State s) {
  for (auto& f : fibers) if (s == kClusterWait && f.state != kDone && !f.arrived) return false;
  if (!release(0, fibers.size(), s)) return false;
  for (auto& f : fibers) if (s == kClusterWait) f.arrived = false;
  return true;
}
// The kernel before ends when no thread can go on without it: all wait for it or for each other, or spin for long.
static bool release_grid(int turn) {
  bool any = false, running = false;
  for (auto& f : fibers) { any |= f.state == kGridWait; running |= f.state == kRun; }
  if (!any || (running && turn < 200)) return false;
  for (auto& l : late) memcpy(l.at, l.content, l.bytes);
  any_late = false;
  for (auto& f : fibers) if (f.state == kGridWait) f.state = kRun;
  return true;
}
static int run_cluster(Dim3 first, int threads) {
  const size_t kStack = 256 << 10;
  const size_t count = (size_t)threads * cluster;
  memset(named_storage, 0, sizeof named_storage);
  for (int b = 0; b < cluster; ++b) memset(smem_storage[b], 0xff, kSmem);          // bf16, f16 and f32 NaN
  for (auto& l : late) memset(l.at, 0xff, l.bytes);
  any_late = !late.empty();
  if (fibers.size() != count) {
    for (auto& f : fibers) free(f.stack);
    fibers.assign(count, Fiber());
    for (auto& f : fibers) f.stack = (unsigned char*)aligned_alloc(64, kStack);
  }
  for (size_t i = 0; i < count; ++i) {
    Fiber& f = fibers[i];
    f.index = i; f.rank = i / threads; f.tid = {(int)(i % threads), 0, 0}; f.state = kRun; f.arrived = false; f.stores = 0;
    f.groups.clear(); f.open.clear();
    void** top = (void**)(f.stack + kStack) - 2;
    *top = (void*)trampoline;
    f.sp = top - 6;
  }
  int warps = (threads + kWarp - 1) / kWarp * cluster, turn = 0;
  for (;;) {
    bool ran = false, live = false;
    ++turn;
    for (int w = 0; w < warps; ++w) {
      int warp = turn % 2 ? w : warps - 1 - w;           // no fixed order between warps
      int block = warp / (warps / cluster), from = block * threads + warp % (warps / cluster) * kWarp;
      int to = from + kWarp < (block + 1) * threads ? from + kWarp : (block + 1) * threads;
      smem = smem_storage[block]; named = named_storage[block];
      block_idx = {first.x + block, first.y, first.z};
      for (int i = from; i < to; ++i) {
        if (fibers[i].state != kRun) continue;
        ran = true; cur = &fibers[i];
        emu_switch(&main_sp, cur->sp);
      }
      if (release(from, to, kWarpWait)) ran = true;
    }
    for (int b = 0; b < cluster; ++b) if (release(b * threads, (b + 1) * threads, kBlockWait)) ran = true;
    if (!in_flight.empty() && turn % 3 == 0) {             // copies take a while, and end in the order of their start
      tma_finish(in_flight.front()); in_flight.pop_front(); ran = true;
    }
    if (release_all(kClusterWait)) ran = true;
    if (release_grid(turn)) ran = true;
    for (auto& f : fibers) live |= f.state != kDone;
    if (!live && in_flight.empty()) return 0;
    if (!live && !in_flight.front().storer) { fprintf(stderr, "kernel ended with a TMA load in flight\n"); abort(); }
    if (!ran) { fprintf(stderr, "deadlock: threads wait for different barriers\n"); return 1; }
  }
}
}  // namespace emu
extern "C" void emu_late(void* at, const void* content, long bytes) {
  emu::late.push_back({(unsigned char*)at, (const unsigned char*)content, (size_t)bytes});
}
extern "C" int emu_run(void (*kernel)(void**), void** args, int gx, int gy, int gz, int threads, int cluster) {
  if (gx % cluster || cluster > emu::kMaxCluster || (cluster > 1 && threads % emu::kWarp)) return 1;
  emu::entry = kernel; emu::entry_args = args; emu::cluster = cluster;
  emu::grid_dim = {gx, gy, gz};
  int failed = 0;
  for (int z = 0; z < gz; ++z) for (int y = 0; y < gy; ++y) for (int x = 0; x < gx; x += cluster)
    if (!failed) failed = emu::run_cluster({x, y, z}, threads);
  for (auto& l : emu::late) memcpy(l.at, l.content, l.bytes);
  emu::late.clear();
  return failed;
}
