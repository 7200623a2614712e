#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/piece.h"
#include "core/segment.h"
#include "core/unique_fd.h"

namespace megatron_ext {

/// How an arena is divided. Two messages that were sent and not received need two slots; a message
/// longer than a slot goes through in pieces.
struct ArenaSize {
    std::uint32_t num_slots;
    std::uint64_t slot_bytes;
};

/// Shared memory through which one process sends messages to one other, which owns it.
///
/// The sender puts a piece into any free slot, then the slot's number into `order`, then counts it
/// in `published`: so the receiver meets pieces in the order in which they were sent, however slots
/// were chosen. The receiver gives slots back in any order, as bits in `released`, which the sender
/// collects. Each word has one writing direction, so the death of either side leaves no lock
/// behind. See Inbox and Outbox for the two ends.
class Arena {
  public:
    static constexpr std::uint32_t kMaxSlots = 1024;

    /// A new, empty arena. Throws std::invalid_argument for sizes that cannot be and TransportError
    /// if the memory is not there.
    static Arena create(ArenaSize size);

    /// The arena that another process created. Throws TransportError if it is something else.
    static Arena attach(UniqueFd fd);

    ArenaSize size() const noexcept { return size_; }
    int fd() const noexcept { return segment_.fd(); }

    std::atomic<std::uint64_t>& published() const noexcept;
    /// Whether the sender wants a ring when a slot is released.
    std::atomic<std::uint32_t>& sender_waits() const noexcept;
    /// Word `index` of the bits of slots that were given back.
    std::atomic<std::uint64_t>& released(std::size_t index) const noexcept;
    std::size_t num_released_words() const noexcept { return (size_.num_slots + 63) / 64; }
    /// Where the number of the slot of piece `sequence` stands.
    std::uint32_t& order(std::uint64_t sequence) const noexcept;
    Descriptor& descriptor(std::uint32_t slot) const noexcept;
    std::byte* bytes(std::uint32_t slot) const noexcept;
    /// All slots together, which stand behind each other from slot 0 on; whole pages.
    std::size_t num_slots_bytes() const noexcept;

  private:
    Arena(Segment segment, ArenaSize size);

    struct Header;
    Header& header() const noexcept;
    std::byte* at(std::size_t offset) const noexcept;

    Segment segment_;
    ArenaSize size_;
};

}  // namespace megatron_ext
