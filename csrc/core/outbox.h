#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "core/arena.h"
#include "core/link.h"
#include "core/message.h"
#include "core/process_bell.h"

namespace megatron_ext {

/// The sending end of an arena, with a queue of messages that are waiting for room. Not
/// synchronised.
///
/// A slot may be lent before its message exists: reserve(), then publish(). In between, a device
/// may be writing to the slot and cannot be stopped, so a slot that is never published is never
/// reused, and its memory stays mapped as long as the pointer from reserve() exists, even after the
/// outbox is gone.
class Outbox {
  public:
    /// `bell` belongs to the receiver.
    Outbox(Arena arena, std::shared_ptr<ProcessBell> bell, bool checksums);

    /// Copies as much of a message to its receiver as fits, and queues the remainder. `owner` keeps
    /// `bytes` alive until they are copied.
    void send(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner,
              LinkEvents& events);

    /// Returns the memory of a free slot for a message of this size, to be filled and then
    /// published. Returns null if the message does not fit in a slot, if messages are queued, or if
    /// too many slots are lent: together with the slots that a receiver keeps, they must leave one
    /// slot for the queue.
    std::shared_ptr<std::byte> reserve(std::uint64_t num_bytes);

    /// Sends a message in memory from reserve(), after the queued ones. Throws
    /// std::invalid_argument if the message is stored elsewhere.
    void publish(Message message, LinkEvents& events);

    /// Copies queued messages; `events` gets the owners of completed ones. If messages remain
    /// queued, the receiver will ring when it releases a slot.
    void push(LinkEvents& events);

    std::size_t num_queued() const noexcept { return queue_.size(); }

    /// The memory of the slots, for drivers that pin it.
    const Arena& arena() const noexcept { return *arena_; }

    /// Drops all queued messages; `events` gets their owners.
    void drop_queued(LinkEvents& events);

  private:
    struct Pending {
        MessageInfo info;
        const std::byte* bytes;
        std::shared_ptr<void> owner;
        std::uint64_t sent_bytes;
        std::optional<std::uint32_t> slot;  // set if the message is in a slot already
    };

    bool find_free_slots();
    bool wants_room();
    std::uint32_t take_free_slot();
    void publish_piece(Pending& pending);

    const std::shared_ptr<const Arena> arena_;
    std::shared_ptr<ProcessBell> bell_;
    bool checksums_;
    std::vector<std::uint32_t> free_slots_;
    std::vector<std::uint32_t> reserved_;  // lent but not yet published
    std::deque<Pending> queue_;
    std::uint64_t next_sequence_ = 0;
};

}  // namespace megatron_ext
