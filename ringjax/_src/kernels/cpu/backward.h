// The backward pass, from the joint lse and delta: P = exp(scores - lse).
#pragma once

#include <vector>

#include "rows.h"

namespace ringjax {

// A tile of queries with all that its gradient needs; `q` is scaled, `dout` divided.
template <class A>
struct GradientTile {
  Tile<A> at;
  A *q, *q_turned, *dout, *dout_turned, *lse, *delta, *dq;

  static int64_t size(int64_t width) { return 5 * kTile * width + 2 * kTile; }

  template <class T>
  void fill(const Call<T, A>& call, const Task<T, A>& task, int64_t row, int64_t present) {
    at.fill(call, task, row, present);
    turn(q_turned, call.query, at, call.dim, call.scale);
    turn(dout_turned, call.dout, at, call.dim, call.share);
    copy(q, call.width(), call.query, at.index, at.columns, call.dim, call.scale);
    copy(dout, call.width(), call.dout, at.index, at.columns, call.dim, call.share);
    for (int i = 0; i < kTile; ++i) {
      lse[i] = at.index[i] < 0 ? std::numeric_limits<A>::infinity() : call.lse_in[at.index[i]];
      delta[i] = at.index[i] < 0 ? A{0} : call.delta[at.index[i]];
    }
    std::fill(dq, dq + call.dim * kTile, A{0});
  }
};

// Scores (num, kTile) become probabilities, and the gradients of probabilities those of scores.
template <class A>
void to_gradients(A* scores, A* gradients, const A* lse, const A* delta, int64_t num, int columns) {
  for (int j = 0; j < columns; j += kLanes<A>) {
    const Floats<A> own_lse = load<A>(lse + j), own_delta = load<A>(delta + j);
    for (int64_t at = j; at < num * kTile; at += kTile) {
      const Floats<A> p = exponential(load<A>(scores + at) - own_lse);
      store<A>(scores + at, p);
      store<A>(gradients + at, p * (load<A>(gradients + at) - own_delta));
    }
  }
}

template <class A>
void add_rows(A* to, const int64_t* index, const A* rows, int64_t width, int64_t num, int64_t dim) {
  for (int64_t i = 0; i < num; ++i) {
    if (index[i] < 0) continue;
    A* row = to + index[i] * dim;
    for (int64_t h = 0; h < dim; ++h) row[h] += rows[i * width + h];
  }
}

// Adds the gradients of query blocks [block, block_end) and key rows [key, key_end) of a task: those of the queries, of
// the keys, or both.
template <class T, class A>
class Backward {
 public:
  Backward(const Call<T, A>& call)
      : call_(call),
        width_(call.width()),
        scratch_(4 * kTile * width_ + 2 * kTile * kTile + call.tiles() * GradientTile<A>::size(width_)),
        tiles_(call.tiles()) {
    keys_.k = scratch_.take(kTile * width_);
    keys_.v = scratch_.take(kTile * width_);
    dk_ = scratch_.take(kTile * width_);
    dv_ = scratch_.take(kTile * width_);
    scores_ = scratch_.take(kTile * kTile);
    gradients_ = scratch_.take(kTile * kTile);
    for (auto& tile : tiles_) {
      for (A** rows : {&tile.q, &tile.q_turned, &tile.dout, &tile.dout_turned, &tile.dq})
        *rows = scratch_.take(kTile * width_);
      tile.lse = scratch_.take(kTile);
      tile.delta = scratch_.take(kTile);
    }
  }

  void run(int64_t number, int64_t block, int64_t block_end, int64_t key, int64_t key_end, bool of_queries,
           bool of_keys) {
    const Task<T, A> task(call_, number);
    for (; block < block_end; ++block) {
      const auto span = task.span(block);
      const int64_t end = std::min(span.end, key_end);
      const int64_t start = std::max(span.first, key);
      if (start >= end) continue;
      const int64_t begin = block * call_.block;
      const int64_t num = call_.tiles_of(begin);
      for (int64_t t = 0; t < num; ++t) tiles_[t].fill(call_, task, begin + t * kTile, span.present);
      for (int64_t row = start; row < end; row += kTile) {
        keys_.fill(call_, task, row, end, span.present);
        meet(task, num, of_queries, of_keys);
      }
      for (int64_t t = 0; of_queries && t < num; ++t) write_queries(tiles_[t]);
    }
  }

 private:
  void meet(const Task<T, A>& task, int64_t num, bool of_queries, bool of_keys) {
    const int64_t dim = call_.dim;
    if (of_keys) {
      std::fill(dk_, dk_ + kTile * width_, A{0});
      std::fill(dv_, dv_ + kTile * width_, A{0});
    }
    for (int64_t t = 0; t < num; ++t) {
      GradientTile<A>& tile = tiles_[t];
      const int64_t seen = keys_.seen_by(call_, tile.at);
      const int columns = tile.at.columns;
      if (!seen) continue;
      product<A>(seen, columns, scores_, kTile, keys_.k, width_, 1, tile.q_turned, kTile, dim, false);
      keys_.mask(call_, task, tile.at, scores_, seen);
      product<A>(seen, columns, gradients_, kTile, keys_.v, width_, 1, tile.dout_turned, kTile, dim, false);
      to_gradients(scores_, gradients_, tile.lse, tile.delta, seen, columns);
      if (of_queries) product<A>(dim, columns, tile.dq, kTile, keys_.k, 1, width_, gradients_, kTile, seen, true);
      if (!of_keys) continue;
      product<A>(seen, width_, dv_, width_, scores_, kTile, 1, tile.dout, width_, columns, true);
      product<A>(seen, width_, dk_, width_, gradients_, kTile, 1, tile.q, width_, columns, true);
    }
    if (!of_keys) return;
    add_rows(call_.dk, keys_.index, dk_, width_, keys_.num, dim);
    add_rows(call_.dv + call_.value_shift * dim, keys_.index, dv_, width_, keys_.num, dim);
  }

  void write_queries(const GradientTile<A>& tile) {
    for (int i = 0; i < kTile; ++i) {
      if (tile.at.index[i] < 0) continue;
      A* row = call_.dq + tile.at.index[i] * call_.dim;
      for (int64_t h = 0; h < call_.dim; ++h) row[h] += tile.dq[h * kTile + i] * call_.scale;
    }
  }

  const Call<T, A>& call_;
  const int64_t width_;
  Scratch<A> scratch_;
  std::vector<GradientTile<A>> tiles_;
  Keys<A> keys_;
  A *dk_, *dv_, *scores_, *gradients_;
};

}  // namespace ringjax
