// Shares the items of a call among the threads of a pool.
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

// Runs `make()(item)` for all items: this thread takes them one by one, and so do threads of the pool that come in
// time. Nobody waits for a thread that has not begun, so several calls at once cannot lock each other out. An exception
// on any thread ends the call early and is thrown again by this thread, after the others have finished: one that left
// a thread of the pool would end the process.
template <class Pool, class Make>
void share(Pool& pool, int64_t items, const Make& make) {
  struct State {
    std::atomic<int64_t> next{0};
    std::mutex lock;
    std::condition_variable done;
    int64_t busy = 0;
    bool is_closed = false;
    std::exception_ptr error;
  };
  auto state = std::make_shared<State>();
  auto work = [&make, items](State& state) {
    try {
      if (state.next >= items) return;
      auto worker = make();
      for (int64_t item; (item = state.next.fetch_add(1)) < items;) worker(item);
    } catch (...) {
      state.next = items;  // nobody starts another item
      std::lock_guard<std::mutex> guard(state.lock);
      if (!state.error) state.error = std::current_exception();
    }
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), items) - 1;
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
  } catch (...) {  // no memory to ask for more helpers: those that were asked, and this thread, do the work
  }
  work(*state);
  std::unique_lock<std::mutex> guard(state->lock);
  state->is_closed = true;
  state->done.wait(guard, [&] { return state->busy == 0; });
  if (state->error) std::rethrow_exception(state->error);
}

// The threads that a call may count on: other devices of this process may be calling too.
class Threads {
 public:
  template <class Pool>
  explicit Threads(Pool& pool)
      : num_(std::min<int64_t>(pool.num_threads(), std::max(1u, std::thread::hardware_concurrency())) / ++calls_) {}
  ~Threads() { --calls_; }
  int64_t num() const { return num_; }

 private:
  static inline std::atomic<int64_t> calls_{0};
  const int64_t num_;
};

}  // namespace ringjax
