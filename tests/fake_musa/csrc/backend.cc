// An emulated MUSA device: torch's PrivateUse1 backend over host memory, for tests.
//
// One translation unit, because the headers of ATen are most of the compile time. The parts are in
// runtime.h (devices, memory), guard.h, generator.h (random numbers, hooks), kernels.h, fallback.h,
// musart.h (memory that processes share).
// The Python side (../site/torch_musa) reaches this through torch.ops.fake_musa, so that no header
// of Python is needed.

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "fallback.h"
#include "generator.h"
#include "guard.h"
#include "kernels.h"
#include "musart.h"
#include "runtime.h"
#include "streams.h"

namespace fake_musa {
namespace {

// Registers itself when the library is loaded.
const bool registered = [] {
    c10::SetAllocator(kDeviceType, &allocator());
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", kernels::empty);
    m.impl("empty_strided", kernels::empty_strided);
    m.impl("_copy_from", kernels::copy_from);
    m.impl("_copy_from_and_resize", kernels::copy_from_and_resize);
    m.impl("_local_scalar_dense", kernels::local_scalar_dense);
    m.impl("resize_", kernels::resize_);
    m.impl("record_stream", kernels::record_stream);
    // These only touch sizes, strides and the storage handle; the CPU's own functions do.
    m.impl("set_.source_Storage", at::native::set_);
    m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
    m.impl("view", at::native::view);
    m.impl("unfold", at::native::unfold);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    // torch would compose this from other operators for a backend without a kernel of its own, and
    // round differently in bfloat16. The real device has one.
    m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Under autocast, matrix products run in the lower precision; everything else as it is.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    KERNEL_PRIVATEUSEONE(linear, lower_precision_fp);
    KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp);
    KERNEL_PRIVATEUSEONE(mm, lower_precision_fp);
    KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp);
    KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp);
    KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp);
}

c10::DeviceIndex checked(int64_t index) {
    TORCH_CHECK(index >= 0 && index < device_count(), "invalid device ordinal ", index);
    return static_cast<c10::DeviceIndex>(index);
}

TORCH_LIBRARY(fake_musa, m) {
    m.def("cpu_alias(Tensor(a) self) -> Tensor(a)", cpu_alias);
    m.def("device_count() -> int", []() -> int64_t { return device_count(); });
    m.def("current_device() -> int", []() -> int64_t { return current_device_slot(); });
    m.def("set_device(int index) -> ()", [](int64_t index) { set_current_device(checked(index)); });
    // "Generator?" because that is what torch infers for at::Generator; it is never None.
    m.def("default_generator(int index) -> Generator?",
          [](int64_t index) { return default_generator(checked(index)); });
    // [live bytes, peak bytes, live blocks, allocations so far]
    m.def("memory_counters(int index) -> int[]", [](int64_t index) {
        const MemoryCounters& counters = memory_counters(checked(index));
        return std::vector<int64_t>{counters.live_bytes, counters.peak_bytes, counters.live_blocks,
                                    counters.allocations};
    });
    m.def("current_stream(int index) -> int",
          [](int64_t index) -> int64_t { return current_stream_slot(checked(index)); });
    m.def("set_stream(int index, int stream) -> ()",
          [](int64_t index, int64_t stream) { current_stream_slot(checked(index)) = stream; });
    m.def("stream_submitted(int stream) -> int",
          [](int64_t stream) { return Streams::instance().submitted(stream); });
    m.def("stream_done(int stream, int count) -> bool",
          [](int64_t stream, int64_t count) { return Streams::instance().done(stream, count); });
    m.def("stream_run(int stream, int count) -> ()",
          [](int64_t stream, int64_t count) { Streams::instance().run(stream, count); });
    m.def("synchronize() -> ()", [] { Streams::instance().run_all(); });
    m.def("host_register(int address, int num_bytes) -> bool",
          [](int64_t address, int64_t size) {
              return PinnedMemory::instance().add(address, size);
          });
    m.def("host_unregister(int address) -> bool",
          [](int64_t address) { return PinnedMemory::instance().remove(address); });
    m.def("reset_peak_memory(int index) -> ()", [](int64_t index) {
        MemoryCounters& counters = memory_counters(checked(index));
        counters.peak_bytes = counters.live_bytes.load();
    });
}

}  // namespace
}  // namespace fake_musa
