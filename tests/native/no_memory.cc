// Preloaded by a test: makes the nth large aligned allocation from now on fail. The kernels make one per thread.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

static std::atomic<long> failing{0};

extern "C" void ringjax_fail_allocation(long nth) { failing = nth; }

void* operator new(std::size_t size, std::align_val_t alignment) {
  const bool counts = alignment == std::align_val_t(64) && size >= 16384;
  if (counts && failing > 0 && failing.fetch_sub(1) == 1) throw std::bad_alloc();
  void* memory = nullptr;
  if (posix_memalign(&memory, std::max(static_cast<std::size_t>(alignment), sizeof(void*)), size)) throw std::bad_alloc();
  return memory;
}
