// Streams and pinned memory. The default stream does everything at once. Any other stream defers
// non-blocking copies for as long as possible: until a wait for the stream, or for an event
// recorded after them. So code without the wait always finds unwritten memory. A copy does not keep
// its memory alive, as with a driver: it fails if the memory is gone by then.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Stream.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>

#include "runtime.h"

namespace fake_musa {

// One end of a copy: bytes that somebody else has to keep alive.
class Borrowed {
  public:
    explicit Borrowed(const at::Tensor& tensor)
        : storage_(tensor.storage().getWeakStorageImpl()),
          data_(tensor.mutable_data_ptr()),
          sizes_(tensor.sizes().vec()),
          strides_(tensor.strides().vec()),
          options_(tensor.options().device(at::kCPU).requires_grad(false)) {}

    bool gone() const { return storage_.expired(); }
    at::Tensor bytes() const { return at::from_blob(data_, sizes_, strides_, options_); }

  private:
    c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
    void* data_;
    std::vector<int64_t> sizes_, strides_;
    at::TensorOptions options_;
};

class Streams {
  public:
    static Streams& instance() {
        static Streams streams;
        return streams;
    }

    c10::StreamId make() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return ++last_id_;
    }

    void copy_later(c10::StreamId id, const at::Tensor& source, const at::Tensor& target) {
        const std::lock_guard<std::mutex> lock(mutex_);
        Work& work = work_[id];
        work.copies.push_back({Borrowed(source), Borrowed(target)});
        ++work.submitted;
    }

    // Number of copies enqueued on a stream so far.
    int64_t submitted(c10::StreamId id) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return work_[id].submitted;
    }

    bool done(c10::StreamId id, int64_t count) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return work_[id].done() >= count;
    }

    // Runs the first `count` copies of a stream.
    void run(c10::StreamId id, int64_t count) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (Work& work = work_[id]; work.done() < count;) {
            const Copy copy = std::move(work.copies.front());
            work.copies.pop_front();
            TORCH_CHECK(!copy.source.gone() && !copy.target.gone(),
                        "MUSA error: the memory of a copy was freed before it was done");
            copy.target.bytes().copy_(copy.source.bytes());
            work.let_go();
        }
    }

    // Keeps memory alive until a stream has completed its work so far, as an allocator does after
    // record_stream.
    void keep(c10::StreamId id, const c10::Storage& storage) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (Work& work = work_[id]; work.done() < work.submitted) {
            work.kept.emplace_back(work.submitted, storage);
        }
    }

    void run_all() {
        std::vector<std::pair<c10::StreamId, int64_t>> counts;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (const auto& [id, work] : work_) {
                counts.emplace_back(id, work.submitted);
            }
        }
        for (const auto& [id, count] : counts) {
            run(id, count);
        }
    }

  private:
    struct Copy {
        Borrowed source, target;
    };
    struct Work {
        std::deque<Copy> copies;
        std::deque<std::pair<int64_t, c10::Storage>> kept;
        int64_t submitted = 0;
        int64_t done() const { return submitted - static_cast<int64_t>(copies.size()); }
        void let_go() {
            while (!kept.empty() && kept.front().first <= done()) {
                kept.pop_front();
            }
        }
    };

    std::mutex mutex_;
    std::map<c10::StreamId, Work> work_;
    c10::StreamId last_id_ = 0;
};

// The current stream of each device, 0 for the default one. Thread-local, like the current device.
inline c10::StreamId& current_stream_slot(c10::DeviceIndex device) {
    thread_local std::array<c10::StreamId, kMaxDevices> current{};
    return current.at(static_cast<size_t>(device));
}

// Runs the deferred copies of the current stream, before work that is not deferred.
inline void catch_up(c10::DeviceIndex device) {
    if (const c10::StreamId id = current_stream_slot(device); id != 0) {
        Streams::instance().run(id, Streams::instance().submitted(id));
    }
}

// Pinned host memory, by address.
class PinnedMemory {
  public:
    static PinnedMemory& instance() {
        static PinnedMemory pinned;
        return pinned;
    }

    // `registered`: the memory belongs to another allocator.
    bool add(int64_t address, int64_t num_bytes, bool registered = true) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return blocks_.emplace(address, Block{num_bytes, registered}).second;
    }
    bool remove(int64_t address) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return blocks_.erase(address) != 0;
    }
    bool holds(const void* pointer) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        return find(pointer) != nullptr;
    }
    bool is_registered(const void* pointer) const {
        const std::lock_guard<std::mutex> lock(mutex_);
        const Block* const block = find(pointer);
        return block != nullptr && block->registered;
    }

  private:
    struct Block {
        int64_t num_bytes;
        bool registered;
    };

    const Block* find(const void* pointer) const {
        const auto address = reinterpret_cast<int64_t>(pointer);
        const auto after = blocks_.upper_bound(address);
        if (after == blocks_.begin()) {
            return nullptr;
        }
        const auto& [begin, block] = *std::prev(after);
        return address < begin + block.num_bytes ? &block : nullptr;
    }

    mutable std::mutex mutex_;
    std::map<int64_t, Block> blocks_;
};

// The allocator of torch's pinned host memory. Copies of an asynchronous device keep it alive, as
// torch's own pinned allocator does.
class PinnedAllocator final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t nbytes) override {
        if (nbytes == 0) {
            return {nullptr, c10::kCPU};
        }
        void* const data = std::aligned_alloc(64, (nbytes + 63) / 64 * 64);
        TORCH_CHECK(data != nullptr, "out of memory: tried to pin ", nbytes, " bytes");
        PinnedMemory::instance().add(reinterpret_cast<int64_t>(data),
                                     static_cast<int64_t>(nbytes), /*registered=*/false);
        return {data, data, &PinnedAllocator::release, c10::kCPU};
    }
    void copy_data(void* dest, const void* src, size_t count) const override {
        default_copy_data(dest, src, count);
    }

  private:
    static void release(void* data) {
        PinnedMemory::instance().remove(reinterpret_cast<int64_t>(data));
        std::free(data);
    }
};

}  // namespace fake_musa
