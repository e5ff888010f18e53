// The forward pass: an online softmax of one tile after the other over blocks of keys.
#pragma once

#include <vector>

#include "rows.h"

namespace ringjax {

// The softmax under way of one tile.
template <class A>
struct Running {
  A *q, *acc, *peak, *total;

  void start(int64_t dim) {
    std::fill(acc, acc + dim * kTile, A{0});
    std::fill(peak, peak + kTile, -std::numeric_limits<A>::infinity());
    std::fill(total, total + kTile, A{0});
  }

  // Scores (num, kTile) become weights, and the sums are brought to their peak.
  void rescale(A* scores, int64_t num, int columns, int64_t dim) {
    bool rises = false;
    alignas(64) A decay[kTile];
    for (int j = 0; j < columns; j += kLanes<A>) {
      const Floats<A> old = load<A>(peak + j);
      Floats<A> most = old;
      for (int64_t i = 0; i < num; ++i) {
        const Floats<A> x = load<A>(scores + i * kTile + j);
        most = most > x ? most : x;
      }
      store<A>(peak + j, most);
      const Floats<A> finite = most > -std::numeric_limits<A>::infinity() ? most : Floats<A>{};
      const Floats<A> fall = exponential(old - finite);
      Floats<A> sum{};
      for (int64_t i = 0; i < num; ++i) {
        const Floats<A> weight = exponential(load<A>(scores + i * kTile + j) - finite);
        store<A>(scores + i * kTile + j, weight);
        sum += weight;
      }
      store<A>(total + j, load<A>(total + j) * fall + sum);
      store<A>(decay + j, fall);
      for (int lane = 0; lane < kLanes<A>; ++lane) rises |= fall[lane] != 1;
    }
    if (!rises) return;
    for (int64_t h = 0; h < dim; ++h)
      for (int j = 0; j < columns; j += kLanes<A>)
        store<A>(acc + h * kTile + j, load<A>(acc + h * kTile + j) * load<A>(decay + j));
  }

  // Merges the partial of lane `i` into a row, as `ringjax.softmax.merge` does; rounded once, at the end.
  void merge(int i, A* out, A* lse, int64_t dim) const {
    if (total[i] == 0) return;
    const double all = total[i], found = peak[i] + std::log(all), other = *lse;
    const double lighter = std::exp(-std::abs(found - other)), portion = lighter / (1 + lighter);  // NaN if one is
    *lse = static_cast<A>((found > other ? found : other) + std::log1p(lighter));
    for (int64_t h = 0; h < dim; ++h) {
      const double mine = acc[h * kTile + i] / all, old = out[h];
      out[h] = static_cast<A>(found > other ? mine + (old - mine) * portion : old + (mine - old) * portion);
    }
  }
};

// Merges what the queries of a block find among their keys into what they found before.
template <class T, class A>
class Forward {
 public:
  Forward(const Call<T, A>& call)
      : call_(call),
        width_(call.width()),
        scratch_(2 * kTile * width_ + kTile * kTile + call.tiles() * (2 * call.dim + 2) * kTile),
        tiles_(call.tiles()),
        states_(call.tiles()) {
    keys_.k = scratch_.take(kTile * width_);
    keys_.v = scratch_.take(kTile * width_);
    scores_ = scratch_.take(kTile * kTile);
    for (auto& state : states_) {
      state.q = scratch_.take(call.dim * kTile);
      state.acc = scratch_.take(call.dim * kTile);
      state.peak = scratch_.take(kTile);
      state.total = scratch_.take(kTile);
    }
  }

  void run(int64_t number, int64_t block) {
    const Task<T, A> task(call_, number);
    const auto span = task.span(block);
    const int64_t begin = block * call_.block, dim = call_.dim;
    const int64_t num = call_.tiles_of(begin);
    if (span.first >= span.end) return;
    for (int64_t t = 0; t < num; ++t) {
      tiles_[t].fill(call_, task, begin + t * kTile, span.present);
      turn(states_[t].q, call_.query, tiles_[t], dim, call_.scale);
      states_[t].start(dim);
    }
    for (int64_t row = span.first; row < span.end; row += kTile) {
      keys_.fill(call_, task, row, span.end, span.present);
      for (int64_t t = 0; t < num; ++t) {
        const int64_t seen = keys_.seen_by(call_, tiles_[t]);
        const int columns = tiles_[t].columns;
        if (!seen) continue;
        product<A>(seen, columns, scores_, kTile, keys_.k, width_, 1, states_[t].q, kTile, dim, false);
        keys_.mask(call_, task, tiles_[t], scores_, seen);
        states_[t].rescale(scores_, seen, columns, dim);
        product<A>(dim, columns, states_[t].acc, kTile, keys_.v, 1, width_, scores_, kTile, seen, true);
      }
    }
    for (int64_t t = 0; t < num; ++t)
      for (int i = 0; i < kTile; ++i)
        if (const int64_t at = tiles_[t].index[i]; at >= 0)
          states_[t].merge(i, call_.out + at * dim, call_.lse + at, dim);
  }

 private:
  const Call<T, A>& call_;
  const int64_t width_;
  Scratch<A> scratch_;
  std::vector<Tile<A>> tiles_;
  std::vector<Running<A>> states_;
  Keys<A> keys_;
  A* scores_;
};

}  // namespace ringjax
