// What the harness needs besides the kernels: failing allocations, a thread pool, and arrays without slack.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "passes.h"

// ------------------------------------------------------------------------------------------------- failing allocations
// The nth allocation from now on fails; 0 for none.
inline std::atomic<int64_t> failing{0};

inline void* allocated(size_t size, size_t alignment) {
  if (failing > 0 && failing.fetch_sub(1) == 1) throw std::bad_alloc();
  void* memory = nullptr;
  if (posix_memalign(&memory, std::max(alignment, sizeof(void*)), std::max<size_t>(size, 1))) throw std::bad_alloc();
  return memory;
}
void* operator new(size_t size) { return allocated(size, alignof(std::max_align_t)); }
void* operator new(size_t size, std::align_val_t alignment) { return allocated(size, size_t(alignment)); }
void operator delete(void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { free(memory); }

namespace ringjax {

inline void require(bool holds, const std::string& what) {
  if (holds) return;
  fprintf(stderr, "FAILED: %s\n", what.c_str());
  exit(1);
}

// ------------------------------------------------------------------------------------------------------------- threads
// The part of the interface of XLA's thread pool that the kernels use.
class Pool {
 public:
  explicit Pool(int num) {
    for (int i = 0; i < num; ++i) threads_.emplace_back([this] { serve(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> guard(lock_);
      is_closed_ = true;
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return threads_.size(); }
  template <class F>
  void Schedule(F&& f) {
    std::lock_guard<std::mutex> guard(lock_);
    tasks_.emplace_back(std::forward<F>(f));
    wake_.notify_one();
  }

 private:
  void serve() {
    for (std::unique_lock<std::mutex> guard(lock_);;) {
      wake_.wait(guard, [this] { return is_closed_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      {
        const std::function<void()> task = std::move(tasks_.front());
        tasks_.pop_front();
        guard.unlock();
        task();
      }
      guard.lock();
    }
  }
  std::mutex lock_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool is_closed_ = false;
  std::vector<std::thread> threads_;
};

// -------------------------------------------------------------------------------------------------------------- arrays
inline void from_float(float x, float* y) { *y = x; }
inline void from_float(float x, double* y) { *y = x; }
inline void from_float(float x, BFloat16* y) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  y->bits = bits >> 16;
}
inline void from_float(float x, Float16* y) {  // for normal numbers, 0 and NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int exponent = int(bits >> 23 & 0xff) - 112;
  const uint32_t rest = x != x ? 0x7e00 : exponent <= 0 ? 0 : exponent << 10 | (bits >> 13 & 0x3ff);
  y->bits = (bits >> 16 & 0x8000) | rest;
}

// Rows of `dim` numbers. Sparse arrays use memory only for pages that are written, and may exceed the machine's memory.
template <class T>
class Rows {
 public:
  Rows(int64_t num_rows, int64_t dim, bool is_sparse, float fill) : size_(num_rows * dim), is_sparse_(is_sparse) {
    if (is_sparse) {
      const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      void* memory = mmap(nullptr, size_ * sizeof(T), PROT_READ | PROT_WRITE, flags, -1, 0);
      require(memory != MAP_FAILED, "reserving address space for a sparse array");
      data_ = static_cast<T*>(memory);
      return;
    }
    data_ = static_cast<T*>(malloc(std::max<size_t>(1, size_ * sizeof(T))));
    for (int64_t i = 0; i < size_; ++i) from_float(fill, data_ + i);
  }
  ~Rows() { is_sparse_ ? (void)munmap(data_, size_ * sizeof(T)) : free(data_); }
  Rows(const Rows&) = delete;
  T* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  const int64_t size_;
  const bool is_sparse_;
  T* data_;
};

}  // namespace ringjax
