// The rows of one task (one head in one chunk of one batch entry), in tiles of queries and blocks of keys.
//
// Each query occupies one lane of a vector. A tile holds kTile query rows, transposed to (H, kTile), and attends to
// blocks of kTile key rows. Scores are thus (keys, kTile), and maxima, sums and masks are computed lane by lane:
//
//     scores = K Q'    weights = exp(scores - max)     out' += V' weights
//     dP = V dout'     dS = P (dP - delta)             dq' += K' dS    dv += P dout    dk += dS q
#pragma once

#include <cmath>
#include <limits>
#include <new>

#include "vectors.h"

namespace ringjax {

constexpr int kTile = 64;          // query rows of a tile, and key rows of a key block
constexpr int kMaxMaskInputs = 3;  // segment ids; segments and positions of packed rows

// The arguments of a call, shared by all its tasks. Rows are stored in the dtype T, sums in the dtype A. `StridedRows`
// in blocks.py describes how the rows of a task are found, `KernelConfig` describes the numbers.
template <class T, class A>
struct Call {
  const int32_t *tasks, *kv_block_ranges;  // (tasks, 3): query start, key start, head; (heads, 4, query blocks)
  const T *query, *key, *value, *dout;
  const int32_t *query_inputs, *key_inputs;  // mask inputs (inputs, positions)
  const A *lse_in, *delta;
  A *out, *lse, *dq, *dk, *dv;
  int64_t query_positions, key_positions;  // of a mask input
  int64_t num_tasks, num_query_blocks, num_rows, q_per_kv, tasks_per_head, stride, kv_heads, value_shift;
  int64_t query_block;                    // query rows of a query block
  int64_t num_mask_inputs, before_rules;  // bit i of `before_rules` is set if mask rule i is "before", not "same"
  int64_t dim;
  bool is_causal;
  A scale, output_factor;  // output_factor: 1 / output_divisor

  int64_t width() const { return (dim + kLanes<A> - 1) / kLanes<A> * kLanes<A>; }
  int64_t num_query_rows() const { return num_rows * q_per_kv; }
  // Returns the task to run as number `nth`. Heads vary fastest, so that successive tasks are adjacent in memory.
  int64_t nth_task(int64_t nth) const {
    const int64_t num_heads = num_tasks / tasks_per_head;
    return nth % num_heads * tasks_per_head + nth / num_heads;
  }
  // Returns the number of tiles of the query block that starts at `row`.
  int64_t num_tiles(int64_t row) const { return (std::min(query_block, num_query_rows() - row) + kTile - 1) / kTile; }
  int64_t max_tiles() const { return num_tiles(0); }
};

// Memory of one thread, initially 0. It is handed out in parts whose sizes are multiples of kTile, which keeps them
// aligned.
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

// Finds the rows of one task. Row `m` is a row of the selection, query head `g` one of those that share a key/value
// head.
template <class T, class A>
class Task {
 public:
  Task(const Call<T, A>& call, int64_t task) : call_(call), task_(call.tasks + task * 3) {
    kv_block_ranges_ = call.kv_block_ranges + task / call.tasks_per_head * 4 * call.num_query_blocks;
  }

  // The key rows [first, end) that a query block attends to. The task has `row_count` rows, at most `num_rows`.
  struct KeyRange {
    int64_t first, end, row_count;
  };
  KeyRange key_range(int64_t query_block) const {
    const int64_t n = call_.num_query_blocks, row_count = kv_block_ranges_[3 * n + query_block];
    return {kv_block_ranges_[query_block] * int64_t{kTile},
            std::min(kv_block_ranges_[2 * n + query_block] * int64_t{kTile}, row_count), row_count};
  }

  // Returns the index of a row in its array, or -1 if the row does not exist or is padding: its first mask input is
  // negative.
  int64_t query_index(int64_t m, int64_t g, int64_t row_count) const {
    const int64_t position = task_[0] + m * call_.stride;
    if (m >= row_count || (call_.num_mask_inputs && call_.query_inputs[position] < 0)) return -1;
    return (position * call_.kv_heads + task_[2]) * call_.q_per_kv + g;
  }
  int64_t key_index(int64_t m, int64_t row_count) const {
    const int64_t position = task_[1] + m * call_.stride;
    if (m >= row_count || (call_.num_mask_inputs && call_.key_inputs[position] < 0)) return -1;
    return position * call_.kv_heads + task_[2];
  }
  int32_t query_input(int64_t m, int rule) const {
    return call_.query_inputs[rule * call_.query_positions + task_[0] + m * call_.stride];
  }
  int32_t key_input(int64_t m, int rule) const {
    return call_.key_inputs[rule * call_.key_positions + task_[1] + m * call_.stride];
  }

 private:
  const Call<T, A>& call_;
  const int32_t *task_, *kv_block_ranges_;
};

// Starts to load a row into the cache, which takes long: the hardware prefetcher does not predict rows that are far
// apart. A row with index -1 is skipped.
template <class T>
void prefetch(const T* rows, int64_t index, int64_t dim) {
  if (index < 0) return;
  const char* row = reinterpret_cast<const char*>(rows + index * dim);
  for (int64_t byte = 0; byte < dim * int64_t{sizeof(T)}; byte += 64) __builtin_prefetch(row + byte, 0, 2);
}

// Gathers rows, multiplied by a factor, into (num, width). Rows with index -1 become 0.
template <class T, class A>
void gather(A* to, int64_t width, const T* rows, const int64_t* index, int64_t num, int64_t dim, A factor) {
  for (int64_t i = 0; i < num; ++i)
    for (int64_t h = 0; h < dim; ++h)
      to[i * width + h] = index[i] < 0 ? A{0} : A(to_float(rows[index[i] * dim + h])) * factor;
}

// The indices of a tile of query rows, and what masks compare.
template <class A>
struct Tile {
  int64_t index[kTile];
  int64_t first, last;  // rows `m`
  int columns;          // the number of rows, rounded up to whole vectors
  alignas(64) Int<A> row[kTile];
  alignas(64) Int<A> mask_inputs[kMaxMaskInputs][kTile];

  template <class T>
  void fill(const Call<T, A>& call, const Task<T, A>& task, int64_t start, int64_t row_count) {
    const int64_t end = std::min(start + kTile, call.num_query_rows());
    first = start / call.q_per_kv;
    last = (end - 1) / call.q_per_kv;
    columns = (end - start + kLanes<A> - 1) / kLanes<A> * kLanes<A>;
    int64_t m = first, g = start % call.q_per_kv;
    for (int i = 0; i < kTile; ++i) {
      index[i] = start + i < end ? task.query_index(m, g, row_count) : -1;
      row[i] = m;
      for (int rule = 0; rule < call.num_mask_inputs; ++rule)
        mask_inputs[rule][i] = index[i] < 0 ? -1 : task.query_input(m, rule);
      if (++g == call.q_per_kv) ++m, g = 0;
    }
  }
};

// Gathers the rows of a tile, multiplied by a factor, and transposes them to (dim, kTile).
template <class T, class A>
void gather_transposed(A* columns, const T* rows, const Tile<A>& tile, int64_t dim, A factor) {
  for (int i = 0; i < tile.columns; ++i)
    for (int64_t h = 0; h < dim; ++h)
      columns[h * kTile + i] = tile.index[i] < 0 ? A{0} : A(to_float(rows[tile.index[i] * dim + h])) * factor;
}

// A block of at most kTile key rows.
template <class A>
struct KeyBlock {
  int64_t first, num;
  bool is_ragged;  // some rows have index -1
  int64_t index[kTile];
  A *k, *v;

  template <class T>
  void fill(const Call<T, A>& call, const Task<T, A>& task, int64_t start, int64_t end, int64_t row_count) {
    first = start;
    num = std::min<int64_t>(kTile, end - start);
    is_ragged = false;
    for (int64_t i = 0; i < num; ++i) {
      index[i] = task.key_index(start + i, row_count);
      is_ragged |= index[i] < 0;
    }
    gather(k, call.width(), call.key, index, num, call.dim, A{1});
    gather(v, call.width(), call.value + call.value_shift * call.dim, index, num, call.dim, A{1});
  }

  // Starts to load the next block.
  template <class T>
  void prefetch_next(const Call<T, A>& call, const Task<T, A>& task, int64_t end, int64_t row_count) const {
    for (int64_t m = first + num; m < std::min(first + num + kTile, end); ++m) {
      const int64_t next = task.key_index(m, row_count);
      prefetch(call.key, next, call.dim);
      prefetch(call.value + call.value_shift * call.dim, next, call.dim);
    }
  }

  // Returns how many keys, the first ones, have to be computed for a tile.
  template <class T>
  int64_t num_keys_for(const Call<T, A>& call, const Tile<A>& tile) const {
    return call.is_causal ? std::clamp<int64_t>(tile.last + 1 - first, 0, num) : num;
  }

  // Sets the scores of masked pairs to -inf.
  template <class T>
  void mask(const Call<T, A>& call, const Task<T, A>& task, const Tile<A>& tile, A* scores, int64_t num_keys) const {
    const bool is_diagonal = call.is_causal && first + num_keys - 1 > tile.first;
    if (!is_diagonal && !call.num_mask_inputs && !is_ragged) return;
    const Floats<A> masked = all<A>(-std::numeric_limits<A>::infinity());
    for (int64_t i = 0; i < num_keys; ++i) {
      A* row = scores + i * kTile;
      for (int j = 0; j < tile.columns; j += kLanes<A>) {
        Floats<A> x = load<A>(row + j);
        if (is_diagonal) x = Int<A>(first + i) <= load_ints<A>(tile.row + j) ? x : masked;
        for (int rule = 0; rule < call.num_mask_inputs && index[i] >= 0; ++rule) {
          const Int<A> of_key = task.key_input(first + i, rule);
          const Ints<A> of_query = load_ints<A>(tile.mask_inputs[rule] + j);
          x = (call.before_rules >> rule & 1) ? (of_key <= of_query ? x : masked) : (of_key == of_query ? x : masked);
        }
        store<A>(row + j, index[i] < 0 ? masked : x);
      }
    }
  }
};

}  // namespace ringjax
