// What XLA calls: reads the arguments of a call, runs the pass on the threads of XLA, and reports errors.
#include <exception>
#include <new>
#include <string>

#include "passes.h"
#include "xla/ffi/api/ffi.h"

namespace ringjax {

namespace ffi = xla::ffi;

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

// What XLA calls. An exception must not leave it: XLA is compiled without them, and the process would end.
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
