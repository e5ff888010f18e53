// The passes over all tasks of a call, on the threads of a pool: all that the kernels compute, without XLA.
#pragma once

#include <memory>

#include "backward.h"
#include "forward.h"
#include "pool.h"

namespace ringjax {

template <class Pool, class T, class A>
void run_forward(Pool& pool, const Call<T, A>& call) {
  share(pool, call.num_tasks * call.query_blocks, [&] {
    return [&call, pass = std::make_shared<Forward<T, A>>(call)](int64_t item) {
      const int64_t nth = item / call.num_tasks;  // the longest first
      pass->run(call.task(item % call.num_tasks), call.is_causal ? call.query_blocks - 1 - nth : nth);
    };
  });
}

// A thread adds to all gradients of a task. Where there are fewer tasks than threads, the gradients of queries and of
// keys are two passes, which compute the scores twice and can be shared out by blocks; both ways give the same bits.
template <class Pool, class T, class A>
void run_backward(Pool& pool, const Call<T, A>& call) {
  const Threads threads(pool);
  const int64_t tasks = call.num_tasks, blocks = call.query_blocks;
  const int64_t key_blocks = (call.rows + call.block - 1) / call.block;
  auto each = [&](int64_t items, auto run) {
    share(pool, items, [&] {
      return [&run, pass = std::make_shared<Backward<T, A>>(call)](int64_t item) { run(*pass, item); };
    });
  };
  if (7 * tasks >= 5 * threads.num() || blocks == 1) {  // two passes are 7 products, one is 5
    each(tasks, [&](auto& pass, int64_t item) { pass.run(call.task(item), 0, blocks, 0, call.rows, true, true); });
    return;
  }
  each(tasks * blocks, [&](auto& pass, int64_t item) {
    const int64_t block = blocks - 1 - item / tasks;
    pass.run(item % tasks, block, block + 1, 0, call.rows, true, false);
  });
  each(tasks * key_blocks, [&](auto& pass, int64_t item) {
    const int64_t key = item / tasks * call.block;
    pass.run(item % tasks, 0, blocks, key, std::min(key + call.block, call.rows), false, true);
  });
}

// Sums of products of rows, each in the order and with the roundings in which `Backward` multiplies rows.
template <class Pool, class T, class A>
void run_delta(Pool& pool, const T* x, const T* y, A* sums, int64_t rows, int64_t dim) {
  constexpr int64_t kTogether = 8, kItem = 1024;
  share(pool, (rows + kItem - 1) / kItem, [=] {
    return [=](int64_t item) {
      const int64_t end = std::min((item + 1) * kItem, rows);
      for (int64_t row = item * kItem; row < end; row += kTogether) {
        const int64_t num = std::min(kTogether, end - row);
        A found[kTogether] = {};
        for (int64_t h = 0; h < dim; ++h)
          for (int64_t i = 0; i < num; ++i)
            found[i] += A(widened(x[(row + i) * dim + h])) * A(widened(y[(row + i) * dim + h]));
        std::copy(found, found + num, sums + row);
      }
    };
  });
}

}  // namespace ringjax
