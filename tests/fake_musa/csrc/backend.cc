// An emulated MUSA device: torch's PrivateUse1 backend over host memory, for tests.
//
// One translation unit, because the headers of ATen are most of the compile time. The parts are in
// runtime.h (devices, memory), guard.h, generator.h (random numbers), hooks.h, kernels.h,
// fallback.h, musart.h (memory that processes share); and of the device that runs behind the host:
// queues.h, pool.h (memory), deferred.h (operators), shared_events.h, standstill.h.
// The Python side (../site/torch_musa) reaches this through torch.ops.fake_musa, so that no header
// of Python is needed.

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "fallback.h"
#include "generator.h"
#include "guard.h"
#include "hooks.h"
#include "kernels.h"
#include "musart.h"
#include "pool.h"
#include "queues.h"
#include "runtime.h"
#include "shared_events.h"
#include "standstill.h"
#include "streams.h"

namespace fake_musa {
namespace {

// Registers itself when the library is loaded.
const bool registered = [] {
    c10::SetAllocator(kDeviceType, &allocator());
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    Device::at_start() = [] { Standstill::instance().begin(); };
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
    m.impl("native_dropout", kernels::native_dropout);
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
    m.def("synchronize() -> ()", [] {
        if (is_async()) {
            Device::instance().synchronize("synchronize");
        } else {
            Streams::instance().run_all();
        }
    });
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

// Events by number, for Python.
class Marks {
  public:
    static Marks& instance() {
        static Marks* const marks = new Marks;
        return *marks;
    }
    int64_t add() {
        const std::lock_guard<std::mutex> lock(mutex_);
        marks_[++last_] = nullptr;
        return last_;
    }
    void set(int64_t number, MarkPtr mark) {
        const std::lock_guard<std::mutex> lock(mutex_);
        marks_[number] = std::move(mark);
    }
    MarkPtr get(int64_t number) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return marks_.at(number);
    }
    void remove(int64_t number) {
        const std::lock_guard<std::mutex> lock(mutex_);
        marks_.erase(number);
    }

  private:
    std::mutex mutex_;
    std::map<int64_t, MarkPtr> marks_;
    int64_t last_ = 0;
};

// What Python needs of a device that runs behind the host. A stream is a device and a number.
TORCH_LIBRARY_FRAGMENT(fake_musa, m) {
    m.def("is_async() -> bool", [] { return is_async(); });
    m.def("raw_alias(Tensor self) -> Tensor",
          [](const at::Tensor& tensor) { return raw_alias(tensor); });
    m.def("reserved_bytes() -> int", [] { return Pool::instance().reserved_bytes(); });
    // A kernel that computes nothing and takes a time, in the current stream. With a share below 1
    // it is an exchange, which leaves the rest of the device to kernels.
    m.def("spend(int device, float lasts_us, float share=1.0) -> ()",
          [](int64_t device, double lasts_us, double share) {
              Task task;
              task.name = "spend";
              task.lasts_us = lasts_us;
              task.share = share;
              task.run = [] {};
              Device::instance().submit(current_stream_key(checked(device)), std::move(task));
          });
    // A kernel that runs until a word of host memory is not zero, in the current stream.
    m.def("spin(int device, Tensor flag) -> ()", [](int64_t device, const at::Tensor& flag) {
        Task task;
        task.kind = Kind::kPoll;
        task.name = "spin";
        task.came_s = [flag] {
            const bool is_set = __atomic_load_n(flag.data_ptr<int32_t>(), __ATOMIC_ACQUIRE) != 0;
            return is_set ? now_s() : 0.0;
        };
        Device::instance().submit(current_stream_key(checked(device)), std::move(task));
    });
    m.def("event_new() -> int", [] { return Marks::instance().add(); });
    m.def("event_delete(int event) -> ()", [](int64_t event) { Marks::instance().remove(event); });
    m.def("event_record(int event, int device, int stream) -> ()",
          [](int64_t event, int64_t device, int64_t stream) {
              Marks::instance().set(
                  event, Device::instance().record(stream_key(static_cast<int>(device), stream)));
          });
    m.def("event_wait(int event, int device, int stream) -> ()",
          [](int64_t event, int64_t device, int64_t stream) {
              Device::instance().wait(stream_key(static_cast<int>(device), stream),
                                      Marks::instance().get(event));
          });
    m.def("event_query(int event) -> bool",
          [](int64_t event) { return Device::instance().query(Marks::instance().get(event)); });
    m.def("event_synchronize(int event, str what, float timeout_s) -> bool",
          [](int64_t event, const std::string& what, double timeout_s) {
              return Device::instance().host_wait(Marks::instance().get(event), what.c_str(),
                                                  timeout_s);
          });
    m.def("event_time_s(int event) -> float",
          [](int64_t event) { return Marks::instance().get(event)->time_s; });
    m.def("shared_event_open(int file, int pid) -> int", [](int64_t file, int64_t pid) {
        return SharedEvents::instance().open(file, pid);
    });
    m.def("shared_event_close(int event) -> ()",
          [](int64_t event) { SharedEvents::instance().close(event); });
    m.def("shared_event_record(int event, int device, int stream) -> ()",
          [](int64_t event, int64_t device, int64_t stream) {
              SharedEvents::instance().record(event,
                                              stream_key(static_cast<int>(device), stream));
          });
    m.def("shared_event_wait(int event, int device, int stream) -> ()",
          [](int64_t event, int64_t device, int64_t stream) {
              SharedEvents::instance().wait(event, stream_key(static_cast<int>(device), stream));
          });
    m.def("shared_event_query(int event) -> bool",
          [](int64_t event) { return SharedEvents::instance().query(event); });
    m.def("message_new(int device, int stream, str name) -> int",
          [](int64_t device, int64_t stream, const std::string& name) {
              return Device::instance().new_message(stream_key(static_cast<int>(device), stream),
                                                    name);
          });
    m.def("lags() -> bool", [] { return Costs::instance().lag_us > 0; });
    m.def("message_await_turn(int message) -> float",
          [](int64_t message) { return Device::instance().await_turn(message); });
    m.def("message_end(int message, float end_s, str error) -> ()",
          [](int64_t message, double end_s, const std::string& error) {
              Device::instance().end_message(message, end_s, error);
          });
    m.def("host_state(str text) -> ()",
          [](const std::string& text) { Device::instance().set_host_state(text); });
    m.def("board_new() -> int",
          []() -> int64_t { return Standstill::instance().make_board(); });
    m.def("board_join(int file, int rank) -> ()", [](int64_t file, int64_t rank) {
        Standstill::instance().join(static_cast<int>(file), rank);
    });
    m.def("give_up(str text) -> ()",
          [](const std::string& text) { Device::instance().give_up(text); });
    m.def("heads() -> str", [] { return Device::instance().heads(); });
}

}  // namespace
}  // namespace fake_musa
