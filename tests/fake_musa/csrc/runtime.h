// The emulated machine: the number of devices, the current one, and their memory.
//
// A device is a number and a share of host memory. In synchronous mode everything runs at once on
// the calling thread, except copies on other streams than the default one (streams.h); in
// asynchronous mode everything runs behind the host (queues.h).
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "mode.h"

namespace fake_musa {

constexpr int kMaxDevices = 16;
constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

// Reads the environment once, as a driver reads MUSA_VISIBLE_DEVICES once.
inline c10::DeviceIndex device_count() noexcept {
    static const int count = [] {
        const char* text = std::getenv("FAKE_MUSA_DEVICES");
        return text == nullptr ? 1 : std::clamp(std::atoi(text), 0, kMaxDevices);
    }();
    return static_cast<c10::DeviceIndex>(count);
}

// Thread-local, as in the real runtime: autograd's threads start on device 0 and have to set
// theirs.
inline c10::DeviceIndex& current_device_slot() noexcept {
    thread_local c10::DeviceIndex current = 0;
    return current;
}

inline void set_current_device(c10::DeviceIndex index) {
    TORCH_CHECK(index >= 0 && index < device_count(), "MUSA error: invalid device ordinal ",
                static_cast<int>(index), " of ", static_cast<int>(device_count()));
    current_device_slot() = index;
}

inline c10::Device current_device() noexcept { return {kDeviceType, current_device_slot()}; }

struct MemoryCounters {
    std::atomic<int64_t> live_bytes{0};
    std::atomic<int64_t> peak_bytes{0};
    std::atomic<int64_t> live_blocks{0};
    std::atomic<int64_t> allocations{0};

    void add(int64_t nbytes) {
        const int64_t now = live_bytes += nbytes;
        int64_t peak = peak_bytes.load();
        while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
        }
        ++live_blocks;
        ++allocations;
    }
    void remove(int64_t nbytes) {
        live_bytes -= nbytes;
        --live_blocks;
    }
};

inline MemoryCounters& memory_counters(c10::DeviceIndex index) {
    static std::array<MemoryCounters, kMaxDevices> counters;
    return counters.at(static_cast<size_t>(index));
}

// Allocates memory of an asynchronous device (pool.h).
c10::DataPtr take_from_pool(size_t nbytes, c10::Device device);

// Allocates aligned host memory, labelled with its device.
class Allocator final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t nbytes) override {
        const c10::Device device = current_device();
        if (nbytes == 0) {
            return {nullptr, device};
        }
        if (is_async()) {
            return take_from_pool(nbytes, device);
        }
        const size_t rounded = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
        void* data = std::aligned_alloc(kAlignment, rounded);
        TORCH_CHECK(data != nullptr, "MUSA out of memory: tried to allocate ", nbytes, " bytes");
        // NaN in every float format: a read of uninitialised memory must show, not look like zero.
        std::memset(data, 0xff, rounded);
        memory_counters(device.index()).add(static_cast<int64_t>(nbytes));
        return {data, new Block{data, nbytes, device.index()}, &Allocator::release, device};
    }

    void copy_data(void* dest, const void* src, size_t count) const override {
        default_copy_data(dest, src, count);
    }

  private:
    static constexpr size_t kAlignment = 64;

    struct Block {
        void* data;
        size_t nbytes;
        c10::DeviceIndex device;
    };

    static void release(void* context) {
        auto* block = static_cast<Block*>(context);
        memory_counters(block->device).remove(static_cast<int64_t>(block->nbytes));
        std::free(block->data);
        delete block;
    }
};

inline Allocator& allocator() {
    static Allocator instance;
    return instance;
}

}  // namespace fake_musa
