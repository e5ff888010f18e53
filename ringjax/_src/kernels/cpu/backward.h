// The backward pass, from the lse and delta of all branches: P = exp(scores - lse).
#pragma once

#include <vector>

#include "rows.h"

namespace ringjax {

// A tile of queries with the operands of its gradient. `q` is multiplied by the scale, `dout` divided by the output
// divisor.
template <class A>
struct GradientTile {
  Tile<A> queries;
  A *q, *q_transposed, *dout, *dout_transposed, *lse, *delta, *dq;

  static int64_t size(int64_t width) { return 5 * kTile * width + 2 * kTile; }

  template <class T>
  void fill(const Call<T, A>& call, const Task<T, A>& task, int64_t start, int64_t row_count, bool is_written) {
    queries.fill(call, task, start, row_count);
    for (const int64_t index : queries.index) {
      prefetch(call.dout, index, call.dim);
      if (is_written) prefetch(call.dq, index, call.dim);
    }
    gather_transposed(q_transposed, call.query, queries, call.dim, call.scale);
    gather_transposed(dout_transposed, call.dout, queries, call.dim, call.output_factor);
    gather(q, call.width(), call.query, queries.index, queries.columns, call.dim, call.scale);
    gather(dout, call.width(), call.dout, queries.index, queries.columns, call.dim, call.output_factor);
    for (int i = 0; i < kTile; ++i) {
      const int64_t index = queries.index[i];
      lse[i] = index < 0 ? std::numeric_limits<A>::infinity() : call.lse_in[index];
      delta[i] = index < 0 ? A{0} : call.delta[index];
    }
    std::fill(dq, dq + call.dim * kTile, A{0});
  }
};

// Replaces scores (num, kTile) by probabilities, and gradients of the probabilities by gradients of the scores.
template <class A>
void to_gradients(A* scores, A* gradients, const A* lse, const A* delta, int64_t num, int columns) {
  for (int j = 0; j < columns; j += kLanes<A>) {
    const Floats<A> lane_lse = load<A>(lse + j), lane_delta = load<A>(delta + j);
    for (int64_t i = j; i < num * kTile; i += kTile) {
      const Floats<A> p = exponential(load<A>(scores + i) - lane_lse);
      store<A>(scores + i, p);
      store<A>(gradients + i, p * (load<A>(gradients + i) - lane_delta));
    }
  }
}

// Adds rows (num, width) to the rows with these indices; -1 is skipped.
template <class A>
void add_rows(A* to, const int64_t* index, const A* rows, int64_t width, int64_t num, int64_t dim) {
  for (int64_t i = 0; i < num; ++i) {
    if (index[i] < 0) continue;
    A* row = to + index[i] * dim;
    for (int64_t h = 0; h < dim; ++h) row[h] += rows[i * width + h];
  }
}

// Adds the gradients of the attention of query blocks [block, block_end) to key rows [key, key_end) of a task: those of
// queries, those of keys and values, or both.
template <class T, class A>
class Backward {
 public:
  Backward(const Call<T, A>& call)
      : call_(call),
        width_(call.width()),
        scratch_(4 * kTile * width_ + 2 * kTile * kTile + call.max_tiles() * GradientTile<A>::size(width_)),
        tiles_(call.max_tiles()) {
    keys_.k = scratch_.take(kTile * width_);
    keys_.v = scratch_.take(kTile * width_);
    dk_ = scratch_.take(kTile * width_);
    dv_ = scratch_.take(kTile * width_);
    scores_ = scratch_.take(kTile * kTile);
    gradients_ = scratch_.take(kTile * kTile);
    for (auto& tile : tiles_) {
      for (A** rows : {&tile.q, &tile.q_transposed, &tile.dout, &tile.dout_transposed, &tile.dq})
        *rows = scratch_.take(kTile * width_);
      tile.lse = scratch_.take(kTile);
      tile.delta = scratch_.take(kTile);
    }
  }

  void run(int64_t task_number, int64_t block, int64_t block_end, int64_t key, int64_t key_end, bool of_queries,
           bool of_keys) {
    const Task<T, A> task(call_, task_number);
    for (; block < block_end; ++block) {
      const auto range = task.key_range(block);
      const int64_t end = std::min(range.end, key_end);
      const int64_t first = std::max(range.first, key);
      if (first >= end) continue;
      const int64_t start = block * call_.query_block;
      const int64_t num_tiles = call_.num_tiles(start);
      for (int64_t t = 0; t < num_tiles; ++t)
        tiles_[t].fill(call_, task, start + t * kTile, range.row_count, of_queries);
      for (int64_t row = first; row < end; row += kTile) {
        keys_.fill(call_, task, row, end, range.row_count);
        keys_.prefetch_next(call_, task, end, range.row_count);
        attend(task, num_tiles, of_queries, of_keys);
      }
      for (int64_t t = 0; of_queries && t < num_tiles; ++t) write_queries(tiles_[t]);
    }
  }

 private:
  // Adds the gradients of all tiles and the key block.
  void attend(const Task<T, A>& task, int64_t num_tiles, bool of_queries, bool of_keys) {
    const int64_t dim = call_.dim;
    if (of_keys) {
      for (int64_t i = 0; i < keys_.num; ++i) {
        prefetch(call_.dk, keys_.index[i], dim);
        prefetch(call_.dv + call_.value_shift * dim, keys_.index[i], dim);
      }
      std::fill(dk_, dk_ + kTile * width_, A{0});
      std::fill(dv_, dv_ + kTile * width_, A{0});
    }
    for (int64_t t = 0; t < num_tiles; ++t) {
      GradientTile<A>& tile = tiles_[t];
      const int64_t num_keys = keys_.num_keys_for(call_, tile.queries);
      const int columns = tile.queries.columns;
      if (!num_keys) continue;
      product<A>(num_keys, columns, scores_, kTile, keys_.k, width_, 1, tile.q_transposed, kTile, dim, false);
      keys_.mask(call_, task, tile.queries, scores_, num_keys);
      product<A>(num_keys, columns, gradients_, kTile, keys_.v, width_, 1, tile.dout_transposed, kTile, dim, false);
      to_gradients(scores_, gradients_, tile.lse, tile.delta, num_keys, columns);
      if (of_queries) product<A>(dim, columns, tile.dq, kTile, keys_.k, 1, width_, gradients_, kTile, num_keys, true);
      if (!of_keys) continue;
      product<A>(num_keys, width_, dv_, width_, scores_, kTile, 1, tile.dout, width_, columns, true);
      product<A>(num_keys, width_, dk_, width_, gradients_, kTile, 1, tile.q, width_, columns, true);
    }
    if (!of_keys) return;
    add_rows(call_.dk, keys_.index, dk_, width_, keys_.num, dim);
    add_rows(call_.dv + call_.value_shift * dim, keys_.index, dv_, width_, keys_.num, dim);
  }

  void write_queries(const GradientTile<A>& tile) {
    for (int i = 0; i < kTile; ++i) {
      const int64_t index = tile.queries.index[i];
      if (index < 0) continue;
      A* row = call_.dq + index * call_.dim;
      for (int64_t h = 0; h < call_.dim; ++h) row[h] += tile.dq[h * kTile + i] * call_.scale;
    }
  }

  const Call<T, A>& call_;
  const int64_t width_;
  Scratch<A> scratch_;
  std::vector<GradientTile<A>> tiles_;
  KeyBlock<A> keys_;
  A *dk_, *dv_, *scores_, *gradients_;
};

}  // namespace ringjax
