#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/piece.h"
#include "core/segment.h"
#include "core/unique_fd.h"

namespace megatron_ext {

/// The layout of an arena. Each message in flight needs a slot; a message longer than a slot is
/// sent in pieces.
struct ArenaSize {
    std::uint32_t num_slots;
    std::uint64_t slot_bytes;
};

/// Shared memory through which one process sends messages to another, which owns the memory.
///
/// The sender puts a piece into any free slot, then the slot's number into `order`, then counts it
/// in `published`. So the receiver sees pieces in sending order, regardless of the slots that they
/// use. The receiver releases slots in any order, as bits in `released`, which the sender collects.
/// Each word is written in one direction only, so the death of either process leaves no lock
/// behind. See Inbox and Outbox for the two ends.
class Arena {
  public:
    static constexpr std::uint32_t kMaxSlots = 1024;

    /// Creates an empty arena. Throws std::invalid_argument for impossible sizes and TransportError
    /// if there is not enough memory.
    static Arena create(ArenaSize size);

    /// Attaches an arena that another process created. Throws TransportError if `fd` is not an
    /// arena.
    static Arena attach(UniqueFd fd);

    ArenaSize size() const noexcept { return size_; }
    int fd() const noexcept { return segment_.fd(); }

    std::atomic<std::uint64_t>& published() const noexcept;
    /// Set if the receiver must ring the sender when it releases a slot.
    std::atomic<std::uint32_t>& sender_waits() const noexcept;
    /// Word `index` of the bitmap of released slots.
    std::atomic<std::uint64_t>& released(std::size_t index) const noexcept;
    std::size_t num_released_words() const noexcept { return (size_.num_slots + 63) / 64; }
    /// Where the slot number of piece `sequence` is stored.
    std::uint32_t& order(std::uint64_t sequence) const noexcept;
    Descriptor& descriptor(std::uint32_t slot) const noexcept;
    std::byte* bytes(std::uint32_t slot) const noexcept;
    /// Total size of all slots' memory: whole pages, contiguous from slot 0.
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
