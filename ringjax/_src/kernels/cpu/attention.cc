// The handlers that XLA calls: they read the arguments, run a pass on the threads of XLA, and report errors.
#include <exception>
#include <new>
#include <string>

#include "passes.h"
#include "xla/ffi/api/ffi.h"

namespace ringjax {

namespace ffi = xla::ffi;

// Returns the memory of the nth result, initialized with the argument that it aliases: results alias the last
// arguments, but XLA may still provide other memory.
void* initialized_result(ffi::RemainingArgs& args, ffi::RemainingRets& rets, size_t nth) {
  const auto prior = args.get<ffi::AnyBuffer>(args.size() - rets.size() + nth).value();
  void* result = rets.get<ffi::AnyBuffer>(nth).value()->untyped_data();
  if (result != prior.untyped_data()) std::memcpy(result, prior.untyped_data(), prior.size_bytes());
  return result;
}

template <class T, class A>
ffi::Error run(ffi::ThreadPool& pool, ffi::RemainingArgs& args, ffi::RemainingRets& rets, ffi::Dictionary& attrs,
               bool is_backward) {
  Call<T, A> call{};
  auto buffer = [&](size_t i) { return args.get<ffi::AnyBuffer>(i).value(); };
  auto number = [&](const char* name) { return attrs.get<int64_t>(name).value(); };
  if (number("key_block") != kTile)
    return ffi::Error::InvalidArgument("ringjax: `key_block` of a CPU kernel must be " + std::to_string(kTile) +
                                       ", got " + std::to_string(number("key_block")));
  const auto tasks = buffer(0), ranges = buffer(1), query = buffer(2), query_inputs = buffer(5), key_inputs = buffer(6);
  call.tasks = static_cast<const int32_t*>(tasks.untyped_data());
  call.kv_block_ranges = static_cast<const int32_t*>(ranges.untyped_data());
  call.query = static_cast<const T*>(query.untyped_data());
  call.key = static_cast<const T*>(buffer(3).untyped_data());
  call.value = static_cast<const T*>(buffer(4).untyped_data());
  call.query_inputs = static_cast<const int32_t*>(query_inputs.untyped_data());
  call.key_inputs = static_cast<const int32_t*>(key_inputs.untyped_data());
  call.num_mask_inputs = query_inputs.dimensions()[0];
  call.query_positions = query_inputs.dimensions()[1];
  call.key_positions = key_inputs.dimensions()[1];
  call.num_tasks = tasks.dimensions()[0];
  call.num_query_blocks = ranges.dimensions()[2];
  call.dim = query.dimensions()[1];
  call.num_rows = number("num_rows");
  call.q_per_kv = number("q_per_kv");
  call.tasks_per_head = number("tasks_per_head");
  call.stride = number("stride");
  call.kv_heads = number("kv_heads");
  call.value_shift = number("value_shift");
  call.query_block = number("query_block");
  call.before_rules = number("before_rules");
  call.is_causal = number("is_causal");
  call.scale = static_cast<A>(attrs.get<double>("scale").value());
  call.output_factor = A{1} / static_cast<A>(number("output_divisor"));
  A* sums[3];
  for (size_t i = 0; i < rets.size(); ++i) sums[i] = static_cast<A*>(initialized_result(args, rets, i));
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

template <class T, class A>
ffi::Error run_delta(ffi::ThreadPool& pool, ffi::RemainingArgs& args, ffi::RemainingRets& rets) {
  const auto dout = args.get<ffi::AnyBuffer>(0).value(), out = args.get<ffi::AnyBuffer>(1).value();
  run_delta(pool, static_cast<const T*>(dout.untyped_data()), static_cast<const T*>(out.untyped_data()),
            static_cast<A*>(rets.get<ffi::AnyBuffer>(0).value()->untyped_data()), dout.dimensions()[0],
            dout.dimensions()[1]);
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
ffi::Error dispatch(ffi::ThreadPool& pool, ffi::RemainingArgs& args, ffi::RemainingRets& rets,
                    ffi::Dictionary& attrs) {
  const size_t rows = pass == Pass::kDelta ? 0 : 2;  // an argument of the dtype of the rows
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
      return ffi::Error::InvalidArgument("ringjax: the CPU kernels support float32, float64, bfloat16 and float16");
  }
}

// Converts exceptions to errors: XLA is compiled without exceptions, so one that escaped would terminate the process.
template <Pass pass>
ffi::Error guarded(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Dictionary attrs) {
  try {
    return dispatch<pass>(pool, args, rets, attrs);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "ringjax: out of memory in a CPU kernel");
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("ringjax: a CPU kernel failed: ") + error.what());
  } catch (...) {
    return ffi::Error::Internal("ringjax: a CPU kernel failed");
  }
}

}  // namespace ringjax

#define RINGJAX_BINDING \
  xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>().RemainingArgs().RemainingRets().Attrs()

XLA_FFI_DEFINE_HANDLER_SYMBOL(ringjax_forward, ringjax::guarded<ringjax::Pass::kForward>, RINGJAX_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ringjax_backward, ringjax::guarded<ringjax::Pass::kBackward>, RINGJAX_BINDING);
XLA_FFI_DEFINE_HANDLER_SYMBOL(ringjax_delta, ringjax::guarded<ringjax::Pass::kDelta>, RINGJAX_BINDING);
