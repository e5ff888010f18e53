// The passes over all tasks of a call, on the threads of a pool. This header does not depend on XLA.
#pragma once

#include <memory>

#include "backward.h"
#include "forward.h"
#include "pool.h"

namespace ringjax {

template <class Pool, class T, class A>
void run_forward(Pool& pool, const Call<T, A>& call) {
  parallel_for(pool, call.num_tasks * call.num_query_blocks, [&] {
    return [&call, pass = std::make_shared<Forward<T, A>>(call)](int64_t item) {
      const int64_t nth = item / call.num_tasks;  // if causal, the longest blocks come first
      pass->run(call.nth_task(item % call.num_tasks), call.is_causal ? call.num_query_blocks - 1 - nth : nth);
    };
  });
}

// One pass computes all gradients of a task on one thread. With fewer tasks than threads, two passes compute the
// gradients of queries and those of keys and values. They compute the scores twice, but their items are blocks, not
// tasks. Both ways give bitwise identical results.
template <class Pool, class T, class A>
void run_backward(Pool& pool, const Call<T, A>& call) {
  const Threads threads(pool);
  const int64_t tasks = call.num_tasks, blocks = call.num_query_blocks;
  const int64_t key_ranges = (call.num_rows + call.query_block - 1) / call.query_block;
  auto for_each = [&](int64_t num_items, auto run) {
    parallel_for(pool, num_items, [&] {
      return [&run, pass = std::make_shared<Backward<T, A>>(call)](int64_t item) { run(*pass, item); };
    });
  };
  if (7 * tasks >= 5 * threads.num() || blocks == 1) {  // two passes have 7 products, one has 5
    for_each(tasks, [&](auto& pass, int64_t item) {
      pass.run(call.nth_task(item), 0, blocks, 0, call.num_rows, true, true);
    });
    return;
  }
  for_each(tasks * blocks, [&](auto& pass, int64_t item) {
    const int64_t block = blocks - 1 - item / tasks;
    pass.run(item % tasks, block, block + 1, 0, call.num_rows, true, false);
  });
  for_each(tasks * key_ranges, [&](auto& pass, int64_t item) {
    const int64_t key = item / tasks * call.query_block;
    pass.run(item % tasks, 0, blocks, key, std::min(key + call.query_block, call.num_rows), false, true);
  });
}

// Computes the dot product of each row of `dout` with the same row of `out`, with the order and the rounding of the
// products in `Backward`.
template <class Pool, class T, class A>
void run_delta(Pool& pool, const T* dout, const T* out, A* delta, int64_t num_rows, int64_t dim) {
  constexpr int64_t kRowsAtOnce = 8, kRowsPerItem = 1024;
  parallel_for(pool, (num_rows + kRowsPerItem - 1) / kRowsPerItem, [=] {
    return [=](int64_t item) {
      const int64_t end = std::min((item + 1) * kRowsPerItem, num_rows);
      for (int64_t row = item * kRowsPerItem; row < end; row += kRowsAtOnce) {
        const int64_t num = std::min(kRowsAtOnce, end - row);
        A sums[kRowsAtOnce] = {};
        for (int64_t h = 0; h < dim; ++h)
          for (int64_t i = 0; i < num; ++i)
            sums[i] += A(to_float(dout[(row + i) * dim + h])) * A(to_float(out[(row + i) * dim + h]));
        std::copy(sums, sums + num, delta + row);
      }
    };
  });
}

}  // namespace ringjax
