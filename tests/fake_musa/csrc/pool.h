// The caching allocator of an asynchronous device.
//
// A block belongs to the stream that was current at its allocation. Once freed it is immediately
// available again, to that stream only, whose order protects earlier uses. Another stream that uses
// a block has to be recorded (record_stream); then the block returns once that stream has completed
// the work it had when the block was freed. Memory never returns to the system. Freed blocks are
// overwritten when their stream next takes memory, in the order of that stream, so a late reader
// finds poison, not a segfault: from then on, and not before, a block may belong to somebody else.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "queues.h"
#include "runtime.h"
#include "streams.h"

namespace fake_musa {

inline StreamKey current_stream_key(c10::DeviceIndex device) {
    return stream_key(device, current_stream_slot(device));
}

class Pool {
  public:
    static Pool& instance() {
        static Pool* const pool = new Pool;
        return *pool;
    }

    c10::DataPtr take(size_t nbytes, c10::Device device) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return_retired();
        const StreamKey stream = current_stream_key(device.index());
        overwrite_freed(stream);
        const size_t size = (nbytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
        Block* block = reuse(stream, size);
        if (block == nullptr) {
            block = new Block{std::aligned_alloc(kBlockBytes, size), size, 0, device.index(),
                              stream, {}};
            TORCH_CHECK(block->data != nullptr, "MUSA out of memory: tried to allocate ", nbytes,
                        " bytes");
            std::memset(block->data, kPoison, size);
            reserved_bytes_ += static_cast<int64_t>(size);
        }
        block->nbytes = nbytes;
        memory_counters(device.index()).add(static_cast<int64_t>(nbytes));
        return {block->data, block, &Pool::release, device};
    }

    // Records that a stream uses a block, if `data` is one.
    void use(const c10::DataPtr& data, StreamKey stream) {
        if (data.get_deleter() != &Pool::release) {
            return;  // memory of another allocator
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        auto* const block = static_cast<Block*>(data.get_context());
        if (stream != block->stream) {
            block->users.insert(stream);
        }
    }

    int64_t reserved_bytes() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return reserved_bytes_;
    }

  private:
    static constexpr size_t kBlockBytes = 512;
    static constexpr int kPoison = 0xff;  // NaN in every float format, -1 in every integer

    struct Block {
        void* data;
        size_t size, nbytes;
        c10::DeviceIndex device;
        StreamKey stream;
        std::set<StreamKey> users;
    };
    using Retired = std::pair<Block*, std::vector<MarkPtr>>;

    static void release(void* context) {
        auto* const block = static_cast<Block*>(context);
        memory_counters(block->device).remove(static_cast<int64_t>(block->nbytes));
        instance().put_back(block);
    }

    void put_back(Block* block) {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::vector<MarkPtr> marks;
        for (const StreamKey user : std::exchange(block->users, {})) {
            marks.push_back(Device::instance().record(user));
        }
        if (marks.empty()) {
            make_free(block);
        } else {
            retired_.emplace_back(block, std::move(marks));
        }
    }

    void make_free(Block* block) {
        free_[block->stream][block->size].push_back(block);
        freed_[block->stream].push_back(block);
    }

    void overwrite_freed(StreamKey stream) {
        for (const Block* const block : std::exchange(freed_[stream], {})) {
            Task task;
            task.kind = Kind::kPoison;
            task.name = "the end of a block";
            task.run = [data = block->data, size = block->size] {
                std::memset(data, kPoison, size);
            };
            Device::instance().submit(stream, std::move(task));
        }
    }

    void return_retired() {
        std::vector<Retired> still;
        for (auto& [block, marks] : std::exchange(retired_, {})) {
            while (!marks.empty() && Device::instance().has_passed(marks.back())) {
                marks.pop_back();
            }
            if (marks.empty()) {
                make_free(block);
            } else {
                still.emplace_back(block, std::move(marks));
            }
        }
        retired_ = std::move(still);
    }

    // The smallest block that fits and is at most a quarter too large; the last freed of its size.
    Block* reuse(StreamKey stream, size_t size) {
        auto& by_size = free_[stream];
        const auto found = by_size.lower_bound(size);
        if (found == by_size.end() || found->first > size + size / 4) {
            return nullptr;
        }
        Block* const block = found->second.back();
        found->second.pop_back();
        if (found->second.empty()) {
            by_size.erase(found);
        }
        return block;
    }

    std::mutex mutex_;
    std::map<StreamKey, std::map<size_t, std::vector<Block*>>> free_;
    std::map<StreamKey, std::vector<Block*>> freed_;  // and not yet overwritten
    std::vector<Retired> retired_;
    int64_t reserved_bytes_ = 0;
};

inline c10::DataPtr take_from_pool(size_t nbytes, c10::Device device) {
    return Pool::instance().take(nbytes, device);
}

}  // namespace fake_musa
