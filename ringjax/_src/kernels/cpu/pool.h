// Runs the items of a call on the threads of a pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace ringjax {

// The number of threads of a pool that run at once: with several devices, it has more threads than there are cores.
template <class Pool>
int64_t usable_threads(Pool& pool) {
  return std::min<int64_t>(pool.num_threads(), std::max(1u, std::thread::hardware_concurrency()));
}

// Runs `make_worker()(item)` for all items, on this thread and on threads of the pool: each takes one item at a time.
// The call does not wait for threads that have not started yet, so concurrent calls cannot deadlock. After an exception
// on any thread no further item starts, and this thread rethrows the exception when the others have finished. (An
// exception that escapes a thread of the pool would terminate the process.)
template <class Pool, class MakeWorker>
void parallel_for(Pool& pool, int64_t num_items, const MakeWorker& make_worker) {
  struct State {
    std::atomic<int64_t> next{0};
    std::mutex lock;
    std::condition_variable done;
    int64_t busy = 0;
    bool is_closed = false;
    std::exception_ptr error;
  };
  auto state = std::make_shared<State>();
  auto work = [&make_worker, num_items](State& state) {
    try {
      if (state.next >= num_items) return;
      auto worker = make_worker();
      for (int64_t item; (item = state.next.fetch_add(1)) < num_items;) worker(item);
    } catch (...) {
      state.next = num_items;  // no thread starts another item
      std::lock_guard<std::mutex> guard(state.lock);
      if (!state.error) state.error = std::current_exception();
    }
  };
  const int64_t helpers = std::min(usable_threads(pool), num_items) - 1;
  try {
    for (int64_t i = 0; i < helpers; ++i)
      pool.Schedule([state, work] {
        {
          std::lock_guard<std::mutex> guard(state->lock);
          if (state->is_closed) return;
          ++state->busy;
        }
        work(*state);
        std::lock_guard<std::mutex> guard(state->lock);
        if (--state->busy == 0) state->done.notify_all();
      });
  } catch (...) {  // out of memory: this thread and the helpers scheduled so far do the work
  }
  work(*state);
  std::unique_lock<std::mutex> guard(state->lock);
  state->is_closed = true;
  state->done.wait(guard, [&] { return state->busy == 0; });
  if (state->error) std::rethrow_exception(state->error);
}

// The number of threads that a call can expect, as other devices of this process may make calls at the same time.
class Threads {
 public:
  template <class Pool>
  explicit Threads(Pool& pool) : num_(usable_threads(pool) / ++calls_) {}
  ~Threads() { --calls_; }
  int64_t num() const { return num_; }

 private:
  static inline std::atomic<int64_t> calls_{0};
  const int64_t num_;
};

}  // namespace ringjax
