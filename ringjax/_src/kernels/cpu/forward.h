// The forward pass: an online softmax of the tiles of a query block over key blocks.
#pragma once

#include <vector>

#include "rows.h"

namespace ringjax {

// State of the online softmax of one tile, as `SoftmaxState` in online_softmax.py: `acc` and `denominator` are scaled by
// exp(-max).
template <class A>
struct SoftmaxState {
  A *q, *acc, *max, *denominator;

  void start(int64_t dim) {
    std::fill(acc, acc + dim * kTile, A{0});
    std::fill(max, max + kTile, -std::numeric_limits<A>::infinity());
    std::fill(denominator, denominator + kTile, A{0});
  }

  // Updates the maximum, rescales the sums to it, and replaces the scores (num, kTile) by exp(scores - max).
  void rescale(A* scores, int64_t num, int columns, int64_t dim) {
    bool is_rescaled = false;
    alignas(64) A decays[kTile];
    for (int j = 0; j < columns; j += kLanes<A>) {
      const Floats<A> old_max = load<A>(max + j);
      Floats<A> new_max = old_max;
      for (int64_t i = 0; i < num; ++i) {
        const Floats<A> x = load<A>(scores + i * kTile + j);
        new_max = new_max > x ? new_max : x;
      }
      store<A>(max + j, new_max);
      const Floats<A> finite = new_max > -std::numeric_limits<A>::infinity() ? new_max : Floats<A>{};
      const Floats<A> decay = exponential(old_max - finite);
      Floats<A> sums[4] = {};  // short sums round less than one long sum
      const auto add = [&](int64_t i, Floats<A>& sum) {
        const Floats<A> weight = exponential(load<A>(scores + i * kTile + j) - finite);
        store<A>(scores + i * kTile + j, weight);
        sum += weight;
      };
      int64_t i = 0;
      for (; i + 4 <= num; i += 4)
        for (int k = 0; k < 4; ++k) add(i + k, sums[k]);
      for (; i < num; ++i) add(i, sums[i % 4]);
      const Floats<A> sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      store<A>(denominator + j, load<A>(denominator + j) * decay + sum);
      store<A>(decays + j, decay);
      for (int lane = 0; lane < kLanes<A>; ++lane) is_rescaled |= decay[lane] != 1;
    }
    if (!is_rescaled) return;
    for (int64_t h = 0; h < dim; ++h)
      for (int j = 0; j < columns; j += kLanes<A>)
        store<A>(acc + h * kTile + j, load<A>(acc + h * kTile + j) * load<A>(decays + j));
  }

  // Merges the partial softmax of lane `i` into a row, as `merge` in online_softmax.py; rounded once, at the end.
  void merge(int i, A* out, A* lse, int64_t dim) const {
    if (denominator[i] == 0) return;
    const double sum = denominator[i], new_lse = max[i] + std::log(sum), prior_lse = *lse;
    const double lighter = std::exp(-std::abs(new_lse - prior_lse));
    const double portion = lighter / (1 + lighter);  // NaN if either lse is
    *lse = static_cast<A>((new_lse > prior_lse ? new_lse : prior_lse) + std::log1p(lighter));
    for (int64_t h = 0; h < dim; ++h) {
      const double x = acc[h * kTile + i] / sum, prior = out[h];
      out[h] = static_cast<A>(new_lse > prior_lse ? x + (prior - x) * portion : prior + (x - prior) * portion);
    }
  }
};

// Merges the attention of one query block of a task into the output and lse.
template <class T, class A>
class Forward {
 public:
  Forward(const Call<T, A>& call)
      : call_(call),
        width_(call.width()),
        scratch_(2 * kTile * width_ + kTile * kTile + call.max_tiles() * (2 * call.dim + 2) * kTile),
        tiles_(call.max_tiles()),
        states_(call.max_tiles()) {
    keys_.k = scratch_.take(kTile * width_);
    keys_.v = scratch_.take(kTile * width_);
    scores_ = scratch_.take(kTile * kTile);
    for (auto& state : states_) {
      state.q = scratch_.take(call.dim * kTile);
      state.acc = scratch_.take(call.dim * kTile);
      state.max = scratch_.take(kTile);
      state.denominator = scratch_.take(kTile);
    }
  }

  void run(int64_t task_number, int64_t query_block) {
    const Task<T, A> task(call_, task_number);
    const auto range = task.key_range(query_block);
    const int64_t start = query_block * call_.query_block, dim = call_.dim;
    const int64_t num_tiles = call_.num_tiles(start);
    if (range.first >= range.end) return;
    for (int64_t t = 0; t < num_tiles; ++t) {
      tiles_[t].fill(call_, task, start + t * kTile, range.row_count);
      for (const int64_t index : tiles_[t].index) prefetch(call_.out, index, dim);
      gather_transposed(states_[t].q, call_.query, tiles_[t], dim, call_.scale);
      states_[t].start(dim);
    }
    for (int64_t row = range.first; row < range.end; row += kTile) {
      keys_.fill(call_, task, row, range.end, range.row_count);
      keys_.prefetch_next(call_, task, range.end, range.row_count);
      for (int64_t t = 0; t < num_tiles; ++t) {
        const int64_t num_keys = keys_.num_keys_for(call_, tiles_[t]);
        const int columns = tiles_[t].columns;
        if (!num_keys) continue;
        product<A>(num_keys, columns, scores_, kTile, keys_.k, width_, 1, states_[t].q, kTile, dim, false);
        keys_.mask(call_, task, tiles_[t], scores_, num_keys);
        states_[t].rescale(scores_, num_keys, columns, dim);
        product<A>(dim, columns, states_[t].acc, kTile, keys_.v, 1, width_, scores_, kTile, num_keys, true);
      }
    }
    for (int64_t t = 0; t < num_tiles; ++t)
      for (int i = 0; i < kTile; ++i)
        if (const int64_t index = tiles_[t].index[i]; index >= 0)
          states_[t].merge(i, call_.out + index * dim, call_.lse + index, dim);
  }

 private:
  const Call<T, A>& call_;
  const int64_t width_;
  Scratch<A> scratch_;
  std::vector<Tile<A>> tiles_;
  std::vector<SoftmaxState<A>> states_;
  KeyBlock<A> keys_;
  A* scores_;
};

}  // namespace ringjax
