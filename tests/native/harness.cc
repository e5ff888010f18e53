// Runs the kernels without Python and XLA, for sanitizers: compares many shapes with a naive computation.
//
//     harness [--plant overread|misaligned|race]
//
// With -DQUICK, it checks two of the four dtypes and no random shapes. Arrays are allocated without slack, and rows
// that no task may read are NaN. The sanitizers must report a planted fault.
#ifdef __has_feature  // clang
#if __has_feature(thread_sanitizer)
#define __SANITIZE_THREAD__ 1
#endif
#endif

#include <utility>

#include "example.h"

namespace ringjax {

#ifdef __SANITIZE_THREAD__  // 20 times slower, and it shadows all reserved address space
constexpr bool kIsThreadSanitizer = true;
#else
constexpr bool kIsThreadSanitizer = false;
#endif
#ifdef QUICK
constexpr bool kIsQuick = true;
#else
constexpr bool kIsQuick = false;
#endif
constexpr int kRandomShapes = kIsThreadSanitizer ? 15 : 60;

template <class T, class A>
void check(const Shape& shape, uint32_t seed) {
  Pool pool(shape.threads);
  Example<T, A> example(shape, seed);
  example.check_forward(pool);
  example.check_backward(pool);
}

template <class T, class A>
void check_delta(int64_t num_rows, int64_t dim, int threads) {
  Pool pool(threads);
  Rows<T> dout(num_rows, dim, false, 0.5f), out(num_rows, dim, false, -0.25f);
  Rows<A> delta(num_rows, 1, false, NAN);
  run_delta(pool, dout.data(), out.data(), delta.data(), num_rows, dim);
  for (int64_t i = 0; i < num_rows; ++i) require(delta.data()[i] == -A(dim) / 8, "delta of " + std::to_string(dim));
}

// Makes each allocation of a call fail once: the call throws, the threads survive, and the next call is correct.
template <class T, class A>
void check_memory(int threads) {
  Pool pool(threads);
  const Shape shape{2, 96, 2, 1, 8, 96, 1, true, false, false, threads, 64};
  Example<T, A> example(shape, 1);
  int64_t thrown = 0;
  auto fail = [&](auto run) {
    for (int64_t nth = 1, rest = 0; rest <= 0; ++nth) {
      require(nth < 1000, "a call makes finitely many allocations");
      failing = nth;
      try {
        run();
      } catch (const std::bad_alloc&) {
        ++thrown;
      }
      rest = failing.exchange(0);
    }
  };
  fail([&] { run_forward(pool, example.call()); });
  const int64_t forward = std::exchange(thrown, 0);
  fail([&] { run_backward(pool, example.call()); });
  require(forward >= 3 && thrown >= 3, "a call without memory throws");
  check<T, A>(shape, 2);
}

// Makes concurrent calls on one pool, like several devices of one process.
void check_concurrent_calls() {
  Pool pool(3);
  std::vector<std::thread> callers;
  for (int nth = 0; nth < 3; ++nth)
    callers.emplace_back([&pool, nth] {
      Example<float, float> example({1, 130, 1 + nth, 2, 8, 65, 1, true}, nth);
      example.check_forward(pool);
      example.check_backward(pool);
    });
  for (auto& caller : callers) caller.join();
}

template <class T, class A>
void check_shapes() {
  //  batch, length, kv_heads, q_per_kv, dim, segment, rate, is_causal, has_ids, is_packed, threads, query_block
  const Shape shapes[] = {
      {1, 1, 1, 1, 1, 1, 1, true},
      {1, 65, 1, 1, 3, 65, 1, true, false, false, 1, 64},
      {2, 128, 2, 1, 16, 64, 1, false, false, false, 3, 256},
      {1, 201, 3, 2, 20, 201, 2, true, false, false, 4, 64},     // ragged: heads select different numbers of rows
      {2, 150, 4, 3, 7, 75, 4, true, true, false, 2, 128},       // ids and padding
      {1, 140, 1, 4, 33, 140, 1, false, true, false, 4, 64},     // one task on several threads: two passes
      {1, 70, 2, 2, 16, 70, 1, false, false, true, 2, 64},       // packed rows
      {2, 90, 2, 1, 24, 90, 1, true, true, true, 3, 256},        // packed rows with ids, segments and positions
      {1, 8, 5, 1, 256, 8, 16, false, false, false, 2, 256},     // heads that select no row
  };
  uint32_t seed = 0;
  for (const Shape& shape : shapes) check<T, A>(shape, ++seed);
  for (int64_t dim : {1, 5, 64}) check_delta<T, A>(2051, dim, 3);
}

// Positions up to the int32 limit, and rows far beyond 2**31 elements.
template <class T, class A>
void check_far_rows() {
  Shape shape{1, 100, 2, 1, 64, 100, 1, true, false, false, 2, 64};
  shape.spread = (int64_t{1} << 31) / 100;
  check<T, A>(shape, 1);
}

template <class T, class A>
void check_random_shapes(int num) {
  std::mt19937 random(sizeof(T));
  auto draw = [&](int64_t low, int64_t high) { return low + int64_t(random() % (high - low + 1)); };
  for (int nth = 0; nth < num;) {
    Shape shape;
    const int64_t segments = draw(1, 3);
    shape.batch = draw(1, 3), shape.segment = draw(1, 150), shape.length = shape.segment * segments;
    shape.kv_heads = draw(1, 4), shape.q_per_kv = draw(1, 3), shape.dim = nth % 8 ? draw(1, 48) : draw(49, 256);
    shape.rate = draw(1, 5), shape.is_causal = draw(0, 1), shape.has_ids = draw(0, 1), shape.is_packed = draw(0, 3) == 0;
    shape.threads = draw(1, 5), shape.query_block = 64 << draw(0, 3);
    const int64_t num_rows = shape.segment / (shape.is_packed ? 1 : shape.rate);
    if (shape.batch * segments * shape.kv_heads * shape.q_per_kv * num_rows * num_rows * shape.dim < 4'000'000)
      check<T, A>(shape, nth++);
  }
}

// Makes a call with invalid arguments, to check that the sanitizers detect the consequences in the kernels.
void plant(const std::string& fault) {
  Pool pool(4);
  Example<float, float> example({1, 64, 64, 1, 8, 64, 1}, 0);
  Call<float, float>& call = example.call();
  std::vector<int32_t> tasks(call.tasks, call.tasks + 3 * call.num_tasks);
  const int64_t size = call.num_tasks * call.num_rows * call.dim;
  std::vector<float> fewer(call.key, call.key + size - 1);
  if (fault == "overread") call.key = fewer.data();
  if (fault == "misaligned") call.query = reinterpret_cast<const float*>(reinterpret_cast<const char*>(call.query) + 1);
  if (fault == "race") {  // all tasks have the same rows
    for (size_t i = 3; i < tasks.size(); ++i) tasks[i] = tasks[i % 3];
    call.tasks = tasks.data();
  }
  for (int i = 0; i < 20; ++i) run_forward(pool, call);
}

template <class T, class A>
void check_dtype(const char* name) {
  check_shapes<T, A>();
  for (int threads : {1, 3}) check_memory<T, A>(threads);
  if (!kIsThreadSanitizer) check_far_rows<T, A>();
  if (!kIsQuick) check_random_shapes<T, A>(kRandomShapes);
  printf("%s: correct\n", name);
}

}  // namespace ringjax

int main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (first == "--plant" && argc > 2) {
    ringjax::plant(argv[2]);
    return 0;
  }
  ringjax::check_concurrent_calls();
  ringjax::check_dtype<float, float>("float32");
  ringjax::check_dtype<ringjax::BFloat16, float>("bfloat16");
#ifndef QUICK
  ringjax::check_dtype<ringjax::Float16, float>("float16");
  ringjax::check_dtype<double, double>("float64");
#endif
  return 0;
}
