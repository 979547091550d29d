// Fiber scheduler behind cuda_emulator.h (x86-64 only).
#include "cuda_emulator.h"
namespace emu {
alignas(1024) static unsigned char smem_storage[kSmem];
unsigned char* smem = smem_storage;
Fiber* cur;
std::vector<Fiber> fibers;
Dim3 block_idx;
Named named[16];
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
static int run_block(int threads) {
  const size_t kStack = 256 << 10;
  memset(named, 0, sizeof named);
  memset(smem, 0xff, kSmem);                             // bf16, f16 and f32 NaN
  if (fibers.size() != (size_t)threads) {
    for (auto& f : fibers) free(f.stack);
    fibers.assign(threads, Fiber());
    for (auto& f : fibers) f.stack = (unsigned char*)aligned_alloc(64, kStack);
  }
  for (int i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.index = i; f.tid = {i, 0, 0}; f.state = kRun; f.groups.clear(); f.open.clear();
    void** top = (void**)(f.stack + kStack) - 2;
    *top = (void*)trampoline;
    f.sp = top - 6;
  }
  int warps = (threads + kWarp - 1) / kWarp, turn = 0;
  for (;;) {
    bool ran = false, live = false;
    ++turn;
    for (int w = 0; w < warps; ++w) {
      int warp = turn % 2 ? w : warps - 1 - w;           // no fixed order between warps
      for (int i = warp * kWarp; i < threads && i < warp * kWarp + kWarp; ++i) {
        if (fibers[i].state != kRun) continue;
        ran = true; cur = &fibers[i];
        emu_switch(&main_sp, cur->sp);
      }
      if (release(warp * kWarp, threads < warp * kWarp + kWarp ? threads : warp * kWarp + kWarp, kWarpWait)) ran = true;
    }
    if (release(0, threads, kBlockWait)) ran = true;
    for (auto& f : fibers) live |= f.state != kDone;
    if (!live) return 0;
    if (!ran) { fprintf(stderr, "deadlock: threads wait for different barriers\n"); return 1; }
  }
}
}  // namespace emu
extern "C" int emu_run(void (*kernel)(void**), void** args, int gx, int gy, int gz, int threads) {
  emu::entry = kernel; emu::entry_args = args;
  for (int z = 0; z < gz; ++z) for (int y = 0; y < gy; ++y) for (int x = 0; x < gx; ++x) {
    emu::block_idx = {x, y, z};
    if (emu::run_block(threads)) return 1;
  }
  return 0;
}
