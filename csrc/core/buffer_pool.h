#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace megatron_ext {

/// Reusable memory of this process for messages: the first touch of fresh pages costs several times
/// as much as the copy into them.
///
/// Idle plus used memory never exceeds the earlier peak of used memory; idle memory above that is
/// freed, the longest idle first. With add_slots() there is memory besides, at addresses that a
/// driver can pin; messages that fit take it first. Ownership: buffers may outlive the pool.
/// Concurrency: any thread may call every member and release every buffer.
class BufferPool {
  public:
    BufferPool();

    /// A buffer of at least `num_bytes` (> 0) of unspecified content, aligned to 4096, which
    /// returns to the pool with its last owner. Throws std::bad_alloc.
    std::shared_ptr<std::byte> take(std::size_t num_bytes) const;

    /// Adds slots of `slot_bytes`, rounded up to pages, in one block of memory that lasts as long
    /// as the pool and its buffers. Returns its address and its size in bytes, both of whole pages.
    /// To be called once. The block is shared memory: after a fork the parent must not get other
    /// pages than those that its device knows. Throws TransportError if memory is short.
    std::pair<std::byte*, std::size_t> add_slots(std::size_t num_slots,
                                                 std::size_t slot_bytes) const;

    /// Idle memory in bytes, without that of slots.
    std::size_t idle_bytes() const;

  private:
    class State;
    std::shared_ptr<State> state_;
};

}  // namespace megatron_ext
