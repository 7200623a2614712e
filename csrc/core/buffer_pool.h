#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace megatron_ext {

/// This process's reusable memory for messages. Memory is reused because touching fresh pages for
/// the first time costs several times as much as copying into them.
///
/// Idle plus used memory never exceeds the earlier peak of used memory; idle memory above that
/// limit is freed, starting with the memory that has been idle the longest. add_slots() adds memory
/// at addresses that a driver can pin; messages that fit into this memory use it first. Ownership:
/// buffers may outlive the pool. Concurrency: any thread may call every member and release every
/// buffer.
class BufferPool {
  public:
    BufferPool();

    /// Returns a buffer of at least `num_bytes` (> 0) with unspecified content, aligned to 4096.
    /// The last owner returns it to the pool. Throws std::bad_alloc.
    std::shared_ptr<std::byte> take(std::size_t num_bytes) const;

    /// Adds slots of `slot_bytes`, rounded up to pages, in one block of memory that lasts as long
    /// as the pool and its buffers. Returns its address and its size in bytes, both page-aligned.
    /// Call it at most once. The block is shared memory, because after a fork the parent must keep
    /// the pages that its device has registered. Throws TransportError if there is not enough
    /// memory.
    std::pair<std::byte*, std::size_t> add_slots(std::size_t num_slots,
                                                 std::size_t slot_bytes) const;

    /// Idle memory in bytes, not counting slots.
    std::size_t idle_bytes() const;

  private:
    class State;
    std::shared_ptr<State> state_;
};

}  // namespace megatron_ext
