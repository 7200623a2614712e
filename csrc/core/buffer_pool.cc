#include "core/buffer_pool.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <list>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <vector>

#include "core/process.h"
#include "core/segment.h"

namespace megatron_ext {
namespace {

constexpr std::size_t kAlignment = 4096;

struct Block {
    std::byte* data;
    std::size_t capacity;
};

using Blocks = std::list<Block>;

std::size_t whole_pages(std::size_t num_bytes) {
    return (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
}

/// A list with one block. Lists exchange elements without an allocation, so moving a block cannot
/// fail.
Blocks allocate(std::size_t capacity) {
    Blocks blocks(1);
    void* const data = std::aligned_alloc(kAlignment, capacity);
    if (data == nullptr) {
        throw std::bad_alloc();
    }
    blocks.front() = {static_cast<std::byte*>(data), capacity};
    return blocks;
}

}  // namespace

class BufferPool::State {
  public:
    ~State() {
        for (const Block& block : idle_) {
            std::free(block.data);
        }  // no block is in use, because each one keeps the state alive
    }

    std::pair<std::byte*, std::size_t> add_slots(std::size_t num_slots, std::size_t slot_bytes) {
        const std::size_t stride = whole_pages(slot_bytes);
        const std::lock_guard lock(mutex_);
        if (slots_) {
            throw std::logic_error("a pool gets its slots once");
        }
        free_slots_.reserve(num_slots);
        slots_.emplace(Segment::create(num_slots * stride));
        auto* const first = static_cast<std::byte*>(slots_->data());
        for (std::size_t slot = num_slots; slot-- > 0;) {
            free_slots_.push_back(first + slot * stride);
        }
        slot_bytes_ = stride;
        return {first, num_slots * stride};
    }

    /// Returns a free slot that fits; null if there is none.
    std::byte* take_slot(std::size_t num_bytes) {
        const std::lock_guard lock(mutex_);
        if (num_bytes > slot_bytes_ || free_slots_.empty()) {
            return nullptr;
        }
        std::byte* const slot = free_slots_.back();
        free_slots_.pop_back();
        return slot;
    }

    /// The last owner calls this, where no exception can be caught.
    void give_back_slot(std::byte* slot) noexcept {
        if (process_.is_this()) {
            const std::lock_guard lock(mutex_);
            free_slots_.push_back(slot);  // cannot throw: add_slots() has reserved the capacity
        }
    }

    /// The smallest idle block that fits and is not mostly waste, or a new one.
    Blocks::iterator take(std::size_t num_bytes) {
        const std::size_t capacity = whole_pages(num_bytes);
        const std::lock_guard lock(mutex_);
        auto best = idle_.end();
        for (auto it = idle_.begin(); it != idle_.end(); ++it) {
            if (it->capacity >= capacity && it->capacity / 2 <= capacity &&
                (best == idle_.end() || it->capacity < best->capacity)) {
                best = it;
            }
            if (it->capacity == capacity) {
                break;  // an exact fit, which is found at once if all messages have the same size
            }
        }
        if (best == idle_.end()) {
            used_.splice(used_.end(), allocate(capacity));
        } else {
            idle_bytes_ -= best->capacity;
            used_.splice(used_.end(), idle_, best);
        }
        const auto block = std::prev(used_.end());
        used_bytes_ += block->capacity;
        peak_bytes_ = std::max(peak_bytes_, used_bytes_);
        trim();
        return block;
    }

    /// The last owner calls this, where no exception can be caught.
    void give_back(Blocks::iterator block) noexcept {
        if (!process_.is_this()) {
            return;  // a forked child has a copy, and the lock may never be released there
        }
        const std::lock_guard lock(mutex_);
        used_bytes_ -= block->capacity;
        idle_bytes_ += block->capacity;
        idle_.splice(idle_.end(), used_, block);
        trim();
    }

    std::size_t idle_bytes() {
        const std::lock_guard lock(mutex_);
        return idle_bytes_;
    }

  private:
    void trim() noexcept {
        while (!idle_.empty() && used_bytes_ + idle_bytes_ > peak_bytes_) {
            idle_bytes_ -= idle_.front().capacity;
            std::free(idle_.front().data);
            idle_.pop_front();
        }
    }

    const Process process_;
    std::mutex mutex_;
    std::optional<Segment> slots_;
    std::size_t slot_bytes_ = 0;
    std::vector<std::byte*> free_slots_;
    Blocks used_;
    Blocks idle_;  // the longest idle first
    std::size_t idle_bytes_ = 0;
    std::size_t used_bytes_ = 0;
    std::size_t peak_bytes_ = 0;
};

BufferPool::BufferPool() : state_(std::make_shared<State>()) {}

std::pair<std::byte*, std::size_t> BufferPool::add_slots(std::size_t num_slots,
                                                         std::size_t slot_bytes) const {
    return state_->add_slots(num_slots, slot_bytes);
}

std::shared_ptr<std::byte> BufferPool::take(std::size_t num_bytes) const {
    if (std::byte* const slot = state_->take_slot(num_bytes)) {
        return {slot, [state = state_](std::byte* taken) { state->give_back_slot(taken); }};
    }
    const Blocks::iterator block = state_->take(num_bytes);
    return {block->data, [state = state_, block](std::byte*) { state->give_back(block); }};
}

std::size_t BufferPool::idle_bytes() const { return state_->idle_bytes(); }

}  // namespace megatron_ext
