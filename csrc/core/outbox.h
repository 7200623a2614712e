#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/arena.h"
#include "core/link.h"
#include "core/message.h"
#include "core/process_bell.h"

namespace megatron_ext {

/// The sending end of an arena, with a queue of messages that wait for room. Not synchronised.
class Outbox {
  public:
    /// `bell` is the receiver's.
    Outbox(Arena arena, std::shared_ptr<ProcessBell> bell, bool checksums);

    /// Copies as much of a message to its receiver as there is room, and queues the rest. `owner`
    /// keeps `bytes` alive until they are copied.
    void send(const MessageInfo& info, const void* bytes, std::shared_ptr<void> owner,
              LinkEvents& events);

    /// Copies queued messages; `events` gets the owners of completed ones. If messages remain
    /// queued, the receiver will ring when it releases a slot.
    void push(LinkEvents& events);

    std::size_t num_queued() const noexcept { return queue_.size(); }

    /// Drops all queued messages; `events` gets their owners.
    void drop_queued(LinkEvents& events);

  private:
    struct Pending {
        MessageInfo info;
        const std::byte* bytes;
        std::shared_ptr<void> owner;
        std::uint64_t sent_bytes;
    };

    bool find_free_slots();
    bool wants_room();
    void publish_piece(Pending& pending);

    Arena arena_;
    std::shared_ptr<ProcessBell> bell_;
    bool checksums_;
    std::vector<std::uint32_t> free_slots_;
    std::deque<Pending> queue_;
    std::uint64_t next_sequence_ = 0;
};

}  // namespace megatron_ext
