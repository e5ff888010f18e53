// One task, a head in a batch entry or segment: its query rows against its key rows, forward and backward.
//
// Queries stand in the lanes. A tile is kTile query rows, turned (H, kTile); it meets blocks of kTile key rows, so that
// scores are (keys, kTile), and maxima, sums and masks go lane by lane:
//
//     scores = K Q'    weights = exp(scores - peak)    out' += V' weights
//     dP = V dout'     dS = P (dP - delta)             dq' += K' dS    dv += P dout    dk += dS q
#pragma once

#include <cmath>
#include <limits>
#include <new>

#include "vectors.h"

namespace ringjax {

constexpr int kTile = 64;
constexpr int kMostLines = 3;  // of marks: segment ids; segments and positions, where rows travelled

// What all tasks of a call share. Rows are found as `ringjax.block.strided` says, and stored in the dtype T.
template <class T, class A>
struct Call {
  const int32_t *tasks, *spans;
  const T *query, *key, *value, *dout;
  const int32_t *query_marks, *key_marks;  // (lines, positions)
  const A *lse_in, *delta;
  A *out, *lse, *dq, *dk, *dv;
  int64_t query_positions, key_positions;  // of a line of marks
  int64_t num_tasks, query_blocks, rows, group, head_tasks, step, heads, value_shift, block, lines, before, dim;
  bool is_causal;
  A scale, share;  // share: 1 / divisor

  int64_t width() const { return (dim + kLanes<A> - 1) / kLanes<A> * kLanes<A>; }
  int64_t query_rows() const { return rows * group; }
  // The tasks in another order, heads first: those that come one after the other stand side by side in memory.
  int64_t task(int64_t nth) const {
    const int64_t num_heads = num_tasks / head_tasks;
    return nth % num_heads * head_tasks + nth / num_heads;
  }
  // Tiles of a query block: of the one that starts at a row, and of any.
  int64_t tiles_of(int64_t row) const { return (std::min(block, query_rows() - row) + kTile - 1) / kTile; }
  int64_t tiles() const { return tiles_of(0); }
};

// Memory of a thread, 0 at first, given out in pieces whose sizes are multiples of kTile and so stay aligned.
template <class A>
class Scratch {
 public:
  explicit Scratch(int64_t size) : memory_(static_cast<A*>(operator new(size * sizeof(A), std::align_val_t(64)))) {
    std::fill(memory_, memory_ + size, A{0});
  }
  ~Scratch() { operator delete(memory_, std::align_val_t(64)); }
  Scratch(const Scratch&) = delete;
  A* take(int64_t size) {
    used_ += size;
    return memory_ + used_ - size;
  }

 private:
  A* memory_;
  int64_t used_ = 0;
};

// The rows of one task.
template <class T, class A>
class Task {
 public:
  Task(const Call<T, A>& call, int64_t task) : call_(call), task_(call.tasks + task * 3) {
    spans_ = call.spans + task / call.head_tasks * 4 * call.query_blocks;
  }

  // The key rows that a query block meets, of those that are present.
  struct Span {
    int64_t first, end, present;
  };
  Span span(int64_t block) const {
    const int64_t n = call_.query_blocks, present = spans_[3 * n + block];
    return {spans_[block] * int64_t{kTile}, std::min(spans_[2 * n + block] * int64_t{kTile}, present), present};
  }

  // Index of the query row of head `nth` of a group, or -1 where it is not there; a first mark below 0 is padding.
  int64_t query_index(int64_t number, int64_t nth, int64_t present) const {
    const int64_t position = task_[0] + number * call_.step;
    if (number >= present || (call_.lines && call_.query_marks[position] < 0)) return -1;
    return (position * call_.heads + task_[2]) * call_.group + nth;
  }
  int64_t key_index(int64_t row, int64_t present) const {
    const int64_t position = task_[1] + row * call_.step;
    if (row >= present || (call_.lines && call_.key_marks[position] < 0)) return -1;
    return position * call_.heads + task_[2];
  }
  int32_t query_mark(int64_t number, int line) const {
    return call_.query_marks[line * call_.query_positions + task_[0] + number * call_.step];
  }
  int32_t key_mark(int64_t row, int line) const {
    return call_.key_marks[line * call_.key_positions + task_[1] + row * call_.step];
  }

 private:
  const Call<T, A>& call_;
  const int32_t *task_, *spans_;
};

// Rows side by side, each `width` apart.
template <class T, class A>
void copy(A* to, int64_t width, const T* rows, const int64_t* index, int64_t num, int64_t dim, A factor) {
  for (int64_t i = 0; i < num; ++i)
    for (int64_t h = 0; h < dim; ++h)
      to[i * width + h] = index[i] < 0 ? A{0} : A(widened(rows[index[i] * dim + h])) * factor;
}

// A tile of query rows: where they stand, and what masks compare.
template <class A>
struct Tile {
  int64_t index[kTile];
  int64_t first, last;  // row numbers
  int columns;          // whole vectors that hold the rows
  alignas(64) Int<A> number[kTile];
  alignas(64) Int<A> marks[kMostLines][kTile];

  template <class T>
  void fill(const Call<T, A>& call, const Task<T, A>& task, int64_t row, int64_t present) {
    const int64_t end = std::min(row + kTile, call.query_rows());
    first = row / call.group;
    last = (end - 1) / call.group;
    columns = (end - row + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
    int64_t at = first, nth = row % call.group;
    for (int i = 0; i < kTile; ++i) {
      index[i] = row + i < end ? task.query_index(at, nth, present) : -1;
      number[i] = at;
      for (int line = 0; line < call.lines; ++line) marks[line][i] = index[i] < 0 ? -1 : task.query_mark(at, line);
      if (++nth == call.group) ++at, nth = 0;
    }
  }
};

// Turns the rows of a tile, of width `dim`, into columns (dim, kTile), multiplied by a factor.
template <class T, class A>
void turn(A* columns, const T* rows, const Tile<A>& tile, int64_t dim, A factor) {
  for (int i = 0; i < tile.columns; ++i)
    for (int64_t h = 0; h < dim; ++h)
      columns[h * kTile + i] = tile.index[i] < 0 ? A{0} : A(widened(rows[tile.index[i] * dim + h])) * factor;
}

// A block of key rows.
template <class A>
struct Keys {
  int64_t first, num;
  bool is_ragged;  // some are not there
  int64_t index[kTile];
  A *k, *v;

  template <class T>
  void fill(const Call<T, A>& call, const Task<T, A>& task, int64_t row, int64_t end, int64_t present) {
    first = row;
    num = std::min<int64_t>(kTile, end - row);
    is_ragged = false;
    for (int64_t i = 0; i < num; ++i) {
      index[i] = task.key_index(row + i, present);
      is_ragged |= index[i] < 0;
    }
    copy(k, call.width(), call.key, index, num, call.dim, A{1});
    copy(v, call.width(), call.value + call.value_shift * call.dim, index, num, call.dim, A{1});
  }

  // How many of them a tile may see.
  template <class T>
  int64_t seen_by(const Call<T, A>& call, const Tile<A>& tile) const {
    return call.is_causal ? std::clamp<int64_t>(tile.last + 1 - first, 0, num) : num;
  }

  // -inf in the place of the scores of pairs that do not see each other.
  template <class T>
  void mask(const Call<T, A>& call, const Task<T, A>& task, const Tile<A>& tile, A* scores, int64_t seen) const {
    const bool is_diagonal = call.is_causal && first + seen - 1 > tile.first;
    if (!is_diagonal && !call.lines && !is_ragged) return;
    const Floats<A> hidden = all<A>(-std::numeric_limits<A>::infinity());
    for (int64_t i = 0; i < seen; ++i) {
      A* row = scores + i * kTile;
      for (int j = 0; j < tile.columns; j += kLanes<A>) {
        Floats<A> x = load<A>(row + j);
        if (is_diagonal) x = Int<A>(first + i) <= load_ints<A>(tile.number + j) ? x : hidden;
        for (int line = 0; line < call.lines && index[i] >= 0; ++line) {
          const Int<A> mark = task.key_mark(first + i, line);
          const Ints<A> mine = load_ints<A>(tile.marks[line] + j);
          x = (call.before >> line & 1) ? (mark <= mine ? x : hidden) : (mark == mine ? x : hidden);
        }
        store<A>(row + j, index[i] < 0 ? hidden : x);
      }
    }
  }
};

}  // namespace ringjax
