// A call of the kernels with random arrays, and its expected results, computed naively.
#pragma once

#include <map>
#include <random>

#include "support.h"

namespace ringjax {

struct Shape {
  int64_t batch = 1, length = 64, kv_heads = 1, q_per_kv = 1, dim = 16, segment = 64, rate = 1;
  bool is_causal = false;
  bool has_ids = false;    // three segment ids in each batch entry, and padding at the end
  bool is_packed = false;  // rows as sent on a ring: consecutive chunks, with keys and values in one array
  int threads = 1;
  int64_t query_block = 256;
  int64_t spread = 1;  // distance of successive positions in memory; if more than 1, arrays are sparse

  std::string name() const {
    char text[256];
    snprintf(text, sizeof text,
             "batch %ld, length %ld, heads %ld x %ld, dim %ld, segment %ld, rate %ld, causal %d, ids %d, packed %d, "
             "threads %d, query block %ld, spread %ld",
             long(batch), long(length), long(kv_heads), long(q_per_kv), long(dim), long(segment), long(rate), is_causal,
             has_ids, is_packed, threads, long(query_block), long(spread));
    return text;
  }
};

constexpr float kUntouched = 7;

// A call with its arrays. Dense: tasks are heads x batch x segments, and rows are `rate` apart. Packed: a task has two
// chunks of rows, and the queries of the second attend to the keys of the first.
template <class T, class A>
class Example {
 public:
  Example(const Shape& shape, uint32_t seed)
      : shape_(shape),
        is_sparse_(shape.spread > 1),
        num_segments_(shape.is_packed ? 1 : shape.length / shape.segment),
        num_rows_(shape.is_packed ? shape.length : (shape.segment + shape.rate - 1) / shape.rate),
        kv_heads_(shape.is_packed ? 1 : shape.kv_heads),
        num_tasks_(shape.kv_heads * shape.batch * num_segments_),
        num_positions_(shape.is_packed ? 2 * num_tasks_ * num_rows_ : shape.batch * shape.length * shape.spread),
        num_key_rows_(num_positions_ * kv_heads_),
        query(num_key_rows_ * shape.q_per_kv, shape.dim, is_sparse_, NAN),
        dout(num_key_rows_ * shape.q_per_kv, shape.dim, is_sparse_, NAN),
        key(num_key_rows_ * (shape.is_packed ? 2 : 1), shape.dim, is_sparse_, NAN),
        value(shape.is_packed ? 0 : num_key_rows_, shape.dim, is_sparse_, NAN),
        lse_in(num_key_rows_ * shape.q_per_kv, 1, is_sparse_, NAN),
        delta(num_key_rows_ * shape.q_per_kv, 1, is_sparse_, NAN),
        out(num_key_rows_ * shape.q_per_kv, shape.dim, is_sparse_, kUntouched),
        lse(num_key_rows_ * shape.q_per_kv, 1, is_sparse_, kUntouched),
        dq(num_key_rows_ * shape.q_per_kv, shape.dim, is_sparse_, kUntouched),
        dk(num_key_rows_ * (shape.is_packed ? 2 : 1), shape.dim, is_sparse_, kUntouched),
        dv(shape.is_packed ? 0 : num_key_rows_, shape.dim, is_sparse_, kUntouched),
        random_(seed) {
    fill_tables();
    fill_call();
    fill_rows();
  }

  const Call<T, A>& call() const { return call_; }
  Call<T, A>& call() { return call_; }
  const std::string name() const { return shape_.name() + ", " + std::to_string(sizeof(T)) + " bytes"; }

  void check_forward(Pool& pool) {
    std::map<int64_t, std::vector<double>> expected;  // output and lse of each query row
    for_rows([&](const Task<T, A>& task, int64_t m, int64_t at) {
      std::vector<double> sum(shape_.dim + 1, 0);
      const double prior_lse = call_.lse[at], max = std::max(prior_lse, max_score(task, m, at));
      double denominator = std::exp(prior_lse - max);
      for (int64_t h = 0; h < shape_.dim; ++h) sum[h] = denominator * call_.out[at * shape_.dim + h];
      for_keys(task, m, [&](int64_t key) {
        const double weight = std::exp(score(at, key) - max);
        denominator += weight;
        for (int64_t h = 0; h < shape_.dim; ++h) sum[h] += weight * number(call_.value, shifted(key), h);
      });
      for (int64_t h = 0; h < shape_.dim; ++h) sum[h] /= denominator;
      sum[shape_.dim] = max + std::log(denominator);
      expected[at] = sum;
    });
    run_forward(pool, call_);
    for (const auto& [at, row] : expected) {
      for (int64_t h = 0; h < shape_.dim; ++h) close(call_.out[at * shape_.dim + h], row[h], "output");
      close(call_.lse[at], row[shape_.dim], "lse");
    }
    if (!is_sparse_) check_untouched(out, expected, "output");
  }

  void check_backward(Pool& pool) {
    std::map<int64_t, std::vector<double>> dq_expected, dk_expected, dv_expected;
    auto prior = [&](auto& expected, const A* sums, int64_t at) -> std::vector<double>& {
      auto [found, is_new] = expected.try_emplace(at, sums + at * shape_.dim, sums + (at + 1) * shape_.dim);
      return found->second;
    };
    for_rows([&](const Task<T, A>& task, int64_t m, int64_t at) {
      std::vector<double>& dq_row = prior(dq_expected, call_.dq, at);
      for_keys(task, m, [&](int64_t key) {
        std::vector<double>& dk_row = prior(dk_expected, call_.dk, key);
        std::vector<double>& dv_row = prior(dv_expected, call_.dv, shifted(key));
        double dp = 0;
        const double p = std::exp(score(at, key) - call_.lse_in[at]);
        for (int64_t h = 0; h < shape_.dim; ++h)
          dp += number(call_.dout, at, h) * call_.output_factor * number(call_.value, shifted(key), h);
        const double ds = p * (dp - call_.delta[at]) * call_.scale;
        for (int64_t h = 0; h < shape_.dim; ++h) {
          dq_row[h] += ds * number(call_.key, key, h);
          dk_row[h] += ds * number(call_.query, at, h);
          dv_row[h] += p * number(call_.dout, at, h) * call_.output_factor;
        }
      });
    });
    run_backward(pool, call_);
    auto compare = [&](const auto& expected, const A* found, const char* what) {
      for (const auto& [at, row] : expected)
        for (int64_t h = 0; h < shape_.dim; ++h) close(found[at * shape_.dim + h], row[h], what);
    };
    compare(dq_expected, call_.dq, "gradient of queries");
    compare(dk_expected, call_.dk, "gradient of keys");
    compare(dv_expected, call_.dv, "gradient of values");
    if (!is_sparse_) check_untouched(dq, dq_expected, "gradient of queries");
  }

 private:
  void fill_tables() {
    const int64_t blocks = (num_rows_ * shape_.q_per_kv + shape_.query_block - 1) / shape_.query_block;
    const int64_t tasks_per_head = num_tasks_ / shape_.kv_heads;
    for (int64_t head = 0; head < shape_.kv_heads; ++head) {
      const int64_t offset = shape_.is_packed ? 0 : head % shape_.rate;
      const int64_t count = shape_.is_packed ? num_rows_ : (shape_.segment - offset + shape_.rate - 1) / shape_.rate;
      for (int64_t nth = 0; nth < tasks_per_head; ++nth) {
        const int64_t task = head * tasks_per_head + nth;
        const int64_t entry = nth / num_segments_, segment = nth % num_segments_;
        const int64_t in_place = (entry * shape_.length + segment * shape_.segment + offset) * shape_.spread;
        tasks_.push_back(shape_.is_packed ? (2 * task + 1) * num_rows_ : in_place);
        tasks_.push_back(shape_.is_packed ? 2 * task * num_rows_ : in_place);
        tasks_.push_back(shape_.is_packed ? 0 : head);
      }
      std::vector<int32_t> ranges(4 * blocks);
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * shape_.query_block / shape_.q_per_kv;
        const int64_t end = std::min((block + 1) * shape_.query_block, num_rows_ * shape_.q_per_kv);
        const int64_t last = (end - 1) / shape_.q_per_kv;
        const bool is_causal = shape_.is_causal && !shape_.is_packed;
        const int64_t high = first >= count ? 0 : is_causal ? std::min(count, last + 1) : count;
        ranges[2 * blocks + block] = (high + kTile - 1) / kTile;
        ranges[3 * blocks + block] = count;
      }
      kv_block_ranges_.insert(kv_block_ranges_.end(), ranges.begin(), ranges.end());
    }
    if (!shape_.has_ids) return;
    for (int64_t input = 0; input < num_mask_inputs(); ++input)  // ids; for packed rows also segments and positions
      for (int64_t at = 0; at < num_positions_; ++at) {
        const int64_t length = shape_.length;
        const int64_t position = shape_.is_packed ? at % num_rows_ : at / shape_.spread % length;
        const bool is_padding = position >= length - length / 8;
        query_inputs_.push_back(input == 2 ? position : is_padding ? -1 : position * 3 / length);
        key_inputs_.push_back(input == 2 ? position : is_padding ? -2 : position * 3 / length);
      }
  }

  int64_t num_mask_inputs() const { return !shape_.has_ids ? 0 : shape_.is_packed ? 3 : 1; }

  void fill_call() {
    call_.tasks = tasks_.data(), call_.kv_block_ranges = kv_block_ranges_.data();
    call_.query = query.data(), call_.dout = dout.data(), call_.key = key.data(), call_.dk = dk.data();
    call_.value_shift = shape_.is_packed ? num_key_rows_ : 0;
    call_.value = shape_.is_packed ? key.data() : value.data();
    call_.dv = shape_.is_packed ? dk.data() : dv.data();
    call_.query_inputs = query_inputs_.data(), call_.key_inputs = key_inputs_.data();
    call_.lse_in = lse_in.data(), call_.delta = delta.data();
    call_.out = out.data(), call_.lse = lse.data(), call_.dq = dq.data();
    call_.query_positions = call_.key_positions = num_positions_;
    call_.num_tasks = num_tasks_, call_.tasks_per_head = num_tasks_ / shape_.kv_heads;
    call_.num_query_blocks = (num_rows_ * shape_.q_per_kv + shape_.query_block - 1) / shape_.query_block;
    call_.query_block = shape_.query_block;
    call_.num_rows = num_rows_, call_.q_per_kv = shape_.q_per_kv, call_.kv_heads = kv_heads_, call_.dim = shape_.dim;
    call_.stride = shape_.is_packed ? 1 : shape_.rate * shape_.spread;
    call_.num_mask_inputs = num_mask_inputs(), call_.before_rules = 4;
    call_.is_causal = shape_.is_causal && !shape_.is_packed;
    call_.scale = A(0.3), call_.output_factor = A(0.5);
  }

  // Sets the rows that tasks may read; all others stay NaN.
  void fill_rows() {
    auto fill = [&](auto* data, int64_t row, int64_t dim) {
      for (int64_t h = 0; h < dim; ++h) from_float(draw(), data + row * dim + h);
    };
    for_rows([&](const Task<T, A>& task, int64_t m, int64_t at) {
      for (T* rows : {query.data(), dout.data()}) fill(rows, at, shape_.dim);
      for (A* rows : {out.data(), dq.data()}) fill(rows, at, shape_.dim);
      for (A* rows : {lse.data(), lse_in.data(), delta.data()}) fill(rows, at, 1);
      lse_in.data()[at] += 3;  // so that the probabilities sum to less than 1
    });
    for (int64_t number = 0; number < num_tasks_; ++number) {
      const Task<T, A> task(call_, number);
      for (int64_t row = 0, key; row < num_rows_; ++row)
        if ((key = task.key_index(row, task.key_range(0).row_count)) >= 0) {
          fill(const_cast<T*>(call_.key), key, shape_.dim), fill(const_cast<T*>(call_.value), shifted(key), shape_.dim);
          fill(call_.dk, key, shape_.dim), fill(call_.dv, shifted(key), shape_.dim);
        }
    }
  }

  template <class Visit>
  void for_rows(const Visit& visit) const {
    for (int64_t number = 0; number < num_tasks_; ++number) {
      const Task<T, A> task(call_, number);
      for (int64_t m = 0; m < num_rows_; ++m)
        for (int64_t g = 0, at; g < shape_.q_per_kv; ++g)
          if ((at = task.query_index(m, g, task.key_range(0).row_count)) >= 0) visit(task, m, at);
    }
  }
  // Visits the key rows that row m of a task attends to.
  template <class Visit>
  void for_keys(const Task<T, A>& task, int64_t m, const Visit& visit) const {
    for (int64_t n = 0, key; n < num_rows_; ++n) {
      if ((key = task.key_index(n, task.key_range(0).row_count)) < 0 || (call_.is_causal && n > m)) continue;
      bool attends = true;
      for (int rule = 0; rule < num_mask_inputs(); ++rule) {
        const int32_t of_query = task.query_input(m, rule), of_key = task.key_input(n, rule);
        attends &= call_.before_rules >> rule & 1 ? of_key <= of_query : of_key == of_query;
      }
      if (attends) visit(key);
    }
  }
  double number(const T* rows, int64_t at, int64_t h) const { return to_float(rows[at * shape_.dim + h]); }
  int64_t shifted(int64_t key) const { return key + call_.value_shift; }
  double score(int64_t at, int64_t key) const {
    double sum = 0;
    for (int64_t h = 0; h < shape_.dim; ++h) sum += number(call_.query, at, h) * number(call_.key, key, h);
    return sum * call_.scale;
  }
  double max_score(const Task<T, A>& task, int64_t m, int64_t at) const {
    double max = -INFINITY;
    for_keys(task, m, [&](int64_t key) { max = std::max(max, score(at, key)); });
    return max;
  }
  float draw() { return (int(random_() % 255) - 127) / 128.0f; }  // exact in every dtype

  void close(double found, double expected, const char* what) const {
    const double tolerance = sizeof(A) == 8 ? 1e-11 : 1e-4;
    if (std::abs(found - expected) <= tolerance * (1 + std::abs(expected))) return;
    const std::string values = std::to_string(found) + ", expected " + std::to_string(expected);
    require(false, std::string(what) + ": " + values + ": " + name());
  }
  template <class Expected>
  void check_untouched(const Rows<A>& rows, const Expected& expected, const char* what) const {
    for (int64_t at = 0; at < rows.size() / shape_.dim; ++at)
      for (int64_t h = 0; h < shape_.dim && !expected.count(at); ++h)
        require(rows.data()[at * shape_.dim + h] == kUntouched, std::string(what) + " of a row of no task: " + name());
  }

  const Shape shape_;
  const bool is_sparse_;
  const int64_t num_segments_, num_rows_, kv_heads_, num_tasks_, num_positions_, num_key_rows_;
  std::vector<int32_t> tasks_, kv_block_ranges_, query_inputs_, key_inputs_;
  Rows<T> query, dout, key, value;
  Rows<A> lse_in, delta, out, lse, dq, dk, dv;
  std::mt19937 random_;
  Call<T, A> call_{};
};

}  // namespace ringjax
