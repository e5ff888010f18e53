// A call of the kernels with random arrays, and what it should give, computed naively.
#pragma once

#include <map>
#include <random>

#include "support.h"

namespace ringjax {

struct Shape {
  int64_t batch = 1, length = 64, kv_heads = 1, group = 1, dim = 16, segment = 64, rate = 1;
  bool is_causal = false;
  bool has_ids = false;    // three ids for each entry of the batch, and padding at the end
  bool is_packed = false;  // rows as they travel on a ring: chunks one after the other, keys and values in one array
  int threads = 1;
  int64_t block = 256;
  int64_t spread = 1;  // positions from one to the next; if more than 1, arrays are sparse

  std::string name() const {
    char text[256];
    snprintf(text, sizeof text,
             "batch %ld, length %ld, heads %ld x %ld, dim %ld, segment %ld, rate %ld, causal %d, ids %d, packed %d, "
             "threads %d, block %ld, spread %ld",
             long(batch), long(length), long(kv_heads), long(group), long(dim), long(segment), long(rate), is_causal,
             has_ids, is_packed, threads, long(block), long(spread));
    return text;
  }
};

constexpr float kUntouched = 7;

// A call with its arrays. In place: tasks are heads x batch x segments, rows `rate` apart. Packed: a task has two chunks
// of rows, and the queries of the second meet the keys of the first.
template <class T, class A>
class Example {
 public:
  Example(const Shape& shape, uint32_t seed)
      : shape_(shape),
        is_sparse_(shape.spread > 1),
        segments_(shape.is_packed ? 1 : shape.length / shape.segment),
        rows_(shape.is_packed ? shape.length : (shape.segment + shape.rate - 1) / shape.rate),
        heads_(shape.is_packed ? 1 : shape.kv_heads),
        num_tasks_(shape.kv_heads * shape.batch * segments_),
        positions_(shape.is_packed ? 2 * num_tasks_ * rows_ : shape.batch * shape.length * shape.spread),
        key_rows_(positions_ * heads_),
        query(key_rows_ * shape.group, shape.dim, is_sparse_, NAN),
        dout(key_rows_ * shape.group, shape.dim, is_sparse_, NAN),
        key(key_rows_ * (shape.is_packed ? 2 : 1), shape.dim, is_sparse_, NAN),
        value(shape.is_packed ? 0 : key_rows_, shape.dim, is_sparse_, NAN),
        lse_in(key_rows_ * shape.group, 1, is_sparse_, NAN),
        delta(key_rows_ * shape.group, 1, is_sparse_, NAN),
        out(key_rows_ * shape.group, shape.dim, is_sparse_, kUntouched),
        lse(key_rows_ * shape.group, 1, is_sparse_, kUntouched),
        dq(key_rows_ * shape.group, shape.dim, is_sparse_, kUntouched),
        dk(key_rows_ * (shape.is_packed ? 2 : 1), shape.dim, is_sparse_, kUntouched),
        dv(shape.is_packed ? 0 : key_rows_, shape.dim, is_sparse_, kUntouched),
        random_(seed) {
    fill_tables();
    fill_call();
    fill_rows();
  }

  const Call<T, A>& call() const { return call_; }
  Call<T, A>& call() { return call_; }
  const std::string name() const { return shape_.name() + ", " + std::to_string(sizeof(T)) + " bytes"; }

  void check_forward(Pool& pool) {
    std::map<int64_t, std::vector<double>> right;  // output and lse of a query row
    for_rows([&](const Task<T, A>& task, int64_t m, int64_t at) {
      std::vector<double> sum(shape_.dim + 1, 0);
      const double other = call_.lse[at], most = std::max(other, largest(task, m, at));
      double total = std::exp(other - most);
      for (int64_t h = 0; h < shape_.dim; ++h) sum[h] = total * call_.out[at * shape_.dim + h];
      for_keys(task, m, [&](int64_t key) {
        const double weight = std::exp(score(at, key) - most);
        total += weight;
        for (int64_t h = 0; h < shape_.dim; ++h) sum[h] += weight * number(call_.value, shifted(key), h);
      });
      for (int64_t h = 0; h < shape_.dim; ++h) sum[h] /= total;
      sum[shape_.dim] = most + std::log(total);
      right[at] = sum;
    });
    run_forward(pool, call_);
    for (const auto& [at, row] : right) {
      for (int64_t h = 0; h < shape_.dim; ++h) close(call_.out[at * shape_.dim + h], row[h], "output");
      close(call_.lse[at], row[shape_.dim], "lse");
    }
    if (!is_sparse_) check_untouched(out, right, "output");
  }

  void check_backward(Pool& pool) {
    std::map<int64_t, std::vector<double>> dq_right, dk_right, dv_right;
    auto prior = [&](auto& right, const A* sums, int64_t at) -> std::vector<double>& {
      auto [found, is_new] = right.try_emplace(at, sums + at * shape_.dim, sums + (at + 1) * shape_.dim);
      return found->second;
    };
    for_rows([&](const Task<T, A>& task, int64_t m, int64_t at) {
      std::vector<double>& dq_row = prior(dq_right, call_.dq, at);
      for_keys(task, m, [&](int64_t key) {
        std::vector<double>&dk_row = prior(dk_right, call_.dk, key), &dv_row = prior(dv_right, call_.dv, shifted(key));
        double dp = 0;
        const double p = std::exp(score(at, key) - call_.lse_in[at]);
        for (int64_t h = 0; h < shape_.dim; ++h)
          dp += number(call_.dout, at, h) * call_.share * number(call_.value, shifted(key), h);
        const double ds = p * (dp - call_.delta[at]) * call_.scale;
        for (int64_t h = 0; h < shape_.dim; ++h) {
          dq_row[h] += ds * number(call_.key, key, h);
          dk_row[h] += ds * number(call_.query, at, h);
          dv_row[h] += p * number(call_.dout, at, h) * call_.share;
        }
      });
    });
    run_backward(pool, call_);
    auto compare = [&](const auto& right, const A* found, const char* what) {
      for (const auto& [at, row] : right)
        for (int64_t h = 0; h < shape_.dim; ++h) close(found[at * shape_.dim + h], row[h], what);
    };
    compare(dq_right, call_.dq, "gradient of queries");
    compare(dk_right, call_.dk, "gradient of keys");
    compare(dv_right, call_.dv, "gradient of values");
    if (!is_sparse_) check_untouched(dq, dq_right, "gradient of queries");
  }

 private:
  void fill_tables() {
    const int64_t blocks = (rows_ * shape_.group + shape_.block - 1) / shape_.block;
    const int64_t head_tasks = num_tasks_ / shape_.kv_heads;
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      const int64_t offset = shape_.is_packed ? 0 : head % shape_.rate;
      const int64_t count = shape_.is_packed ? rows_ : (shape_.segment - offset + shape_.rate - 1) / shape_.rate;
      for (int64_t nth = 0; nth < head_tasks; ++nth) {
        const int64_t task = head * head_tasks + nth;
        const int64_t in_place = (nth / segments_ * shape_.length + nth % segments_ * shape_.segment + offset) * shape_.spread;
        tasks_.push_back(shape_.is_packed ? (2 * task + 1) * rows_ : in_place);
        tasks_.push_back(shape_.is_packed ? 2 * task * rows_ : in_place);
        tasks_.push_back(shape_.is_packed ? 0 : head);
      }
      std::vector<int32_t> span(4 * blocks);
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * shape_.block / shape_.group;
        const int64_t last = (std::min((block + 1) * shape_.block, rows_ * shape_.group) - 1) / shape_.group;
        const int64_t high = first >= count ? 0 : shape_.is_causal && !shape_.is_packed ? std::min(count, last + 1) : count;
        span[2 * blocks + block] = (high + kTile - 1) / kTile;
        span[3 * blocks + block] = count;
      }
      spans_.insert(spans_.end(), span.begin(), span.end());
    }
    if (!shape_.has_ids) return;
    for (int64_t line = 0; line < lines(); ++line)  // ids; of packed rows also segments and positions
      for (int64_t at = 0; at < positions_; ++at) {
        const int64_t place = shape_.is_packed ? at % rows_ : at / shape_.spread % shape_.length, length = shape_.length;
        const bool is_padding = place >= length - length / 8;
        query_marks_.push_back(line == 2 ? place : is_padding ? -1 : place * 3 / length);
        key_marks_.push_back(line == 2 ? place : is_padding ? -2 : place * 3 / length);
      }
  }

  int64_t lines() const { return !shape_.has_ids ? 0 : shape_.is_packed ? 3 : 1; }

  void fill_call() {
    call_.tasks = tasks_.data(), call_.spans = spans_.data();
    call_.query = query.data(), call_.dout = dout.data(), call_.key = key.data(), call_.dk = dk.data();
    call_.value_shift = shape_.is_packed ? key_rows_ : 0;
    call_.value = shape_.is_packed ? key.data() : value.data();
    call_.dv = shape_.is_packed ? dk.data() : dv.data();
    call_.query_marks = query_marks_.data(), call_.key_marks = key_marks_.data();
    call_.lse_in = lse_in.data(), call_.delta = delta.data();
    call_.out = out.data(), call_.lse = lse.data(), call_.dq = dq.data();
    call_.query_positions = call_.key_positions = positions_;
    call_.num_tasks = num_tasks_, call_.head_tasks = num_tasks_ / shape_.kv_heads;
    call_.query_blocks = (rows_ * shape_.group + shape_.block - 1) / shape_.block;
    call_.rows = rows_, call_.group = shape_.group, call_.step = shape_.is_packed ? 1 : shape_.rate * shape_.spread;
    call_.heads = heads_, call_.block = shape_.block, call_.lines = lines(), call_.before = 4, call_.dim = shape_.dim;
    call_.is_causal = shape_.is_causal && !shape_.is_packed;
    call_.scale = A(0.3), call_.share = A(0.5);
  }

  // Numbers where a task may read them; everything else stays NaN.
  void fill_rows() {
    auto fill = [&](auto* data, int64_t row, int64_t dim) {
      for (int64_t h = 0; h < dim; ++h) narrow(draw(), data + row * dim + h);
    };
    for_rows([&](const Task<T, A>& task, int64_t m, int64_t at) {
      for (T* rows : {query.data(), dout.data()}) fill(rows, at, shape_.dim);
      for (A* rows : {out.data(), dq.data()}) fill(rows, at, shape_.dim);
      for (A* rows : {lse.data(), lse_in.data(), delta.data()}) fill(rows, at, 1);
      lse_in.data()[at] += 3;  // probabilities of a sum below 1
    });
    for (int64_t number = 0; number < num_tasks_; ++number) {
      const Task<T, A> task(call_, number);
      for (int64_t row = 0, key; row < rows_; ++row)
        if ((key = task.key_index(row, task.span(0).present)) >= 0) {
          fill(const_cast<T*>(call_.key), key, shape_.dim), fill(const_cast<T*>(call_.value), shifted(key), shape_.dim);
          fill(call_.dk, key, shape_.dim), fill(call_.dv, shifted(key), shape_.dim);
        }
    }
  }

  template <class Visit>
  void for_rows(const Visit& visit) const {
    for (int64_t number = 0; number < num_tasks_; ++number) {
      const Task<T, A> task(call_, number);
      for (int64_t m = 0; m < rows_; ++m)
        for (int64_t g = 0, at; g < shape_.group; ++g)
          if ((at = task.query_index(m, g, task.span(0).present)) >= 0) visit(task, m, at);
    }
  }
  // The key rows that row m of a task sees.
  template <class Visit>
  void for_keys(const Task<T, A>& task, int64_t m, const Visit& visit) const {
    for (int64_t n = 0, key; n < rows_; ++n) {
      if ((key = task.key_index(n, task.span(0).present)) < 0 || (call_.is_causal && n > m)) continue;
      bool is_seen = true;
      for (int line = 0; line < lines(); ++line) {
        const int32_t mine = task.query_mark(m, line), theirs = task.key_mark(n, line);
        is_seen &= call_.before >> line & 1 ? theirs <= mine : theirs == mine;
      }
      if (is_seen) visit(key);
    }
  }
  double number(const T* rows, int64_t at, int64_t h) const { return widened(rows[at * shape_.dim + h]); }
  int64_t shifted(int64_t key) const { return key + call_.value_shift; }
  double score(int64_t at, int64_t key) const {
    double sum = 0;
    for (int64_t h = 0; h < shape_.dim; ++h) sum += number(call_.query, at, h) * number(call_.key, key, h);
    return sum * call_.scale;
  }
  double largest(const Task<T, A>& task, int64_t m, int64_t at) const {
    double most = -INFINITY;
    for_keys(task, m, [&](int64_t key) { most = std::max(most, score(at, key)); });
    return most;
  }
  float draw() { return (int(random_() % 255) - 127) / 128.0f; }  // exact in every dtype

  void close(double found, double right, const char* what) const {
    const double tolerance = sizeof(A) == 8 ? 1e-11 : 1e-4;
    if (std::abs(found - right) <= tolerance * (1 + std::abs(right))) return;
    require(false, std::string(what) + ": " + std::to_string(found) + " for " + std::to_string(right) + ": " + name());
  }
  template <class Right>
  void check_untouched(const Rows<A>& rows, const Right& right, const char* what) const {
    for (int64_t at = 0; at < rows.size() / shape_.dim; ++at)
      for (int64_t h = 0; h < shape_.dim && !right.count(at); ++h)
        require(rows.data()[at * shape_.dim + h] == kUntouched, std::string(what) + " of no task: " + name());
  }

  const Shape shape_;
  const bool is_sparse_;
  const int64_t segments_, rows_, heads_, num_tasks_, positions_, key_rows_;
  std::vector<int32_t> tasks_, spans_, query_marks_, key_marks_;
  Rows<T> query, dout, key, value;
  Rows<A> lse_in, delta, out, lse, dq, dk, dv;
  std::mt19937 random_;
  Call<T, A> call_{};
};

}  // namespace ringjax
