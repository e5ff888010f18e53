// What XLA calls: the forward and the backward pass over all tasks, on the threads of XLA.
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "backward.h"
#include "forward.h"
#include "xla/ffi/api/ffi.h"

namespace ringjax {

namespace ffi = xla::ffi;

// Runs `make()(item)` for all items: this thread takes them one by one, and so do threads of the pool that come in
// time. Nobody waits for a thread that has not begun, so several calls at once cannot lock each other out.
template <class Make>
void share(ffi::ThreadPool& pool, int64_t items, const Make& make) {
  struct State {
    std::atomic<int64_t> next{0};
    std::mutex lock;
    std::condition_variable done;
    int64_t busy = 0;
    bool is_closed = false;
  };
  auto state = std::make_shared<State>();
  auto work = [&make, items](State& state) {
    if (state.next >= items) return;
    auto worker = make();
    for (int64_t item; (item = state.next.fetch_add(1)) < items;) worker(item);
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), items) - 1;
  for (int64_t i = 0; i < helpers; ++i)
    pool.Schedule([state, work] {
      {
        std::lock_guard<std::mutex> guard(state->lock);
        if (state->is_closed) return;
        ++state->busy;
      }
      work(*state);
      std::lock_guard<std::mutex> guard(state->lock);
      if (--state->busy == 0) state->done.notify_all();
    });
  work(*state);
  std::unique_lock<std::mutex> guard(state->lock);
  state->is_closed = true;
  state->done.wait(guard, [&] { return state->busy == 0; });
}

template <class T, class A>
void run_forward(ffi::ThreadPool& pool, const Call<T, A>& call) {
  share(pool, call.num_tasks * call.query_blocks, [&] {
    return [&call, pass = std::make_shared<Forward<T, A>>(call)](int64_t item) {
      const int64_t nth = item / call.num_tasks;  // the longest first
      pass->run(call.task(item % call.num_tasks), call.is_causal ? call.query_blocks - 1 - nth : nth);
    };
  });
}

// The threads that a call may count on: other devices of this process may be calling too.
class Threads {
 public:
  explicit Threads(ffi::ThreadPool& pool)
      : num_(std::min<int64_t>(pool.num_threads(), std::max(1u, std::thread::hardware_concurrency())) / ++calls_) {}
  ~Threads() { --calls_; }
  int64_t num() const { return num_; }

 private:
  static inline std::atomic<int64_t> calls_{0};
  const int64_t num_;
};

// A thread adds to all gradients of a task. Where there are fewer tasks than threads, the gradients of queries and of
// keys are two passes, which compute the scores twice and can be shared out by blocks; both ways give the same bits.
template <class T, class A>
void run_backward(ffi::ThreadPool& pool, const Call<T, A>& call) {
  const Threads threads(pool);
  const int64_t tasks = call.num_tasks, blocks = call.query_blocks;
  const int64_t key_blocks = (call.rows + call.block - 1) / call.block;
  auto each = [&](int64_t items, auto run) {
    share(pool, items, [&] {
      return [&run, pass = std::make_shared<Backward<T, A>>(call)](int64_t item) { run(*pass, item); };
    });
  };
  if (7 * tasks >= 5 * threads.num() || blocks == 1) {  // two passes are 7 products, one is 5
    each(tasks, [&](auto& pass, int64_t item) { pass.run(call.task(item), 0, blocks, 0, call.rows, true, true); });
    return;
  }
  each(tasks * blocks, [&](auto& pass, int64_t item) {
    const int64_t block = blocks - 1 - item / tasks;
    pass.run(item % tasks, block, block + 1, 0, call.rows, true, false);
  });
  each(tasks * key_blocks, [&](auto& pass, int64_t item) {
    const int64_t key = item / tasks * call.block;
    pass.run(item % tasks, 0, blocks, key, std::min(key + call.block, call.rows), false, true);
  });
}

// The n-th result, which takes the place of an argument, one of the last, and holds it to begin with.
void* continued(ffi::RemainingArgs& args, ffi::RemainingRets& rets, size_t nth) {
  const auto prior = args.get<ffi::AnyBuffer>(args.size() - rets.size() + nth).value();
  void* sum = rets.get<ffi::AnyBuffer>(nth).value()->untyped_data();
  if (sum != prior.untyped_data()) std::memcpy(sum, prior.untyped_data(), prior.size_bytes());
  return sum;
}

template <class T, class A>
ffi::Error run(ffi::ThreadPool& pool, ffi::RemainingArgs& args, ffi::RemainingRets& rets, ffi::Dictionary& attrs,
               bool is_backward) {
  Call<T, A> call{};
  auto buffer = [&](size_t i) { return args.get<ffi::AnyBuffer>(i).value(); };
  auto number = [&](const char* name) { return attrs.get<int64_t>(name).value(); };
  if (number("tile") != kTile) return ffi::Error::InvalidArgument("ringjax was compiled for tiles of another size");
  const auto tasks = buffer(0), spans = buffer(1), query = buffer(2), query_marks = buffer(5), key_marks = buffer(6);
  call.tasks = static_cast<const int32_t*>(tasks.untyped_data());
  call.spans = static_cast<const int32_t*>(spans.untyped_data());
  call.query = static_cast<const T*>(query.untyped_data());
  call.key = static_cast<const T*>(buffer(3).untyped_data());
  call.value = static_cast<const T*>(buffer(4).untyped_data());
  call.query_marks = static_cast<const int32_t*>(query_marks.untyped_data());
  call.key_marks = static_cast<const int32_t*>(key_marks.untyped_data());
  call.lines = query_marks.dimensions()[0];
  call.query_positions = query_marks.dimensions()[1];
  call.key_positions = key_marks.dimensions()[1];
  call.num_tasks = tasks.dimensions()[0];
  call.query_blocks = spans.dimensions()[2];
  call.dim = query.dimensions()[1];
  call.rows = number("rows");
  call.group = number("group");
  call.head_tasks = number("head_tasks");
  call.step = number("step");
  call.heads = number("heads");
  call.value_shift = number("value_shift");
  call.block = number("block");
  call.before = number("before");
  call.is_causal = number("is_causal");
  call.scale = static_cast<A>(attrs.get<double>("scale").value());
  call.share = A{1} / static_cast<A>(number("divisor"));
  A* sums[3];
  for (size_t i = 0; i < rets.size(); ++i) sums[i] = static_cast<A*>(continued(args, rets, i));
  if (!is_backward) {
    call.out = sums[0];
    call.lse = sums[1];
    run_forward(pool, call);
  } else {
    call.dout = static_cast<const T*>(buffer(7).untyped_data());
    call.lse_in = static_cast<const A*>(buffer(8).untyped_data());
    call.delta = static_cast<const A*>(buffer(9).untyped_data());
    call.dq = sums[0];
    call.dk = sums[1];
    call.dv = sums[rets.size() - 1];
    run_backward(pool, call);
  }
  return ffi::Error::Success();
}

// Sums of products of rows, each in the order and with the roundings in which `Backward` multiplies rows.
template <class T, class A>
ffi::Error run_delta(ffi::ThreadPool& pool, ffi::RemainingArgs& args, ffi::RemainingRets& rets) {
  constexpr int64_t kTogether = 8, kItem = 1024;
  const auto dout = args.get<ffi::AnyBuffer>(0).value(), out = args.get<ffi::AnyBuffer>(1).value();
  const T *x = static_cast<const T*>(dout.untyped_data()), *y = static_cast<const T*>(out.untyped_data());
  A* sums = static_cast<A*>(rets.get<ffi::AnyBuffer>(0).value()->untyped_data());
  const int64_t rows = dout.dimensions()[0], dim = dout.dimensions()[1];
  share(pool, (rows + kItem - 1) / kItem, [=] {
    return [=](int64_t item) {
      const int64_t end = std::min((item + 1) * kItem, rows);
      for (int64_t row = item * kItem; row < end; row += kTogether) {
        const int64_t num = std::min(kTogether, end - row);
        A found[kTogether] = {};
        for (int64_t h = 0; h < dim; ++h)
          for (int64_t i = 0; i < num; ++i)
            found[i] += A(widened(x[(row + i) * dim + h])) * A(widened(y[(row + i) * dim + h]));
        std::copy(found, found + num, sums + row);
      }
    };
  });
  return ffi::Error::Success();
}

enum class Pass { kForward, kBackward, kDelta };

template <class T, class A>
ffi::Error run_pass(Pass pass, ffi::ThreadPool& pool, ffi::RemainingArgs& args, ffi::RemainingRets& rets,
                    ffi::Dictionary& attrs) {
  return pass == Pass::kDelta ? run_delta<T, A>(pool, args, rets)
                              : run<T, A>(pool, args, rets, attrs, pass == Pass::kBackward);
}

template <Pass pass>
ffi::Error dispatch(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  const size_t rows = pass == Pass::kDelta ? 0 : 2;  // the argument that tells the dtype
  switch (args.get<ffi::AnyBuffer>(rows).value().element_type()) {
    case ffi::F32:
      return run_pass<float, float>(pass, pool, args, rets, attrs);
    case ffi::F64:
      return run_pass<double, double>(pass, pool, args, rets, attrs);
    case ffi::BF16:
      return run_pass<BFloat16, float>(pass, pool, args, rets, attrs);
    case ffi::F16:
      return run_pass<Float16, float>(pass, pool, args, rets, attrs);
    default:
      return ffi::Error::InvalidArgument("ringjax takes float32, float64, bfloat16 and float16");
  }
}

}  // namespace ringjax

#define RINGJAX_BINDING \
  xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs()

XLA_FFI_DEFINE_HANDLER_SYMBOL(ringjax_forward, ringjax::dispatch<ringjax::Pass::kForward>, RINGJAX_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ringjax_backward, ringjax::dispatch<ringjax::Pass::kBackward>, RINGJAX_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ringjax_delta, ringjax::dispatch<ringjax::Pass::kDelta>, RINGJAX_BINDING);
