#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "core/arena.h"
#include "core/assembly.h"
#include "core/buffer_pool.h"
#include "core/message.h"
#include "core/process.h"
#include "core/process_bell.h"

namespace megatron_ext {

/// The receiving end of an arena.
///
/// A message that fits in a slot stays there, without a copy, until its last owner releases it, as
/// long as fewer than half of the slots are held in this way. Other messages, and the pieces of
/// long messages, are copied to pool memory immediately. So a slot always becomes free, no matter
/// what the receiver waits for or how long it keeps its messages.
///
/// Ownership: messages keep the arena mapped. Concurrency: next() must be called by one thread; any
/// thread may release messages.
class Inbox {
  public:
    /// `source` is used only in error messages.
    Inbox(int source, ArenaSize size, BufferPool pool);

    /// The descriptor to pass to the sender.
    int fd() const noexcept { return shared_->arena.fd(); }

    /// The memory of the slots, for drivers that pin it.
    const Arena& arena() const noexcept { return shared_->arena; }

    /// Sets the bell to ring when the sender waits for a slot. Call it before the first message.
    void set_sender_bell(std::shared_ptr<ProcessBell> bell);

    /// Returns the next complete message, or std::nullopt if there is none yet. Throws
    /// TransportError if the arena contains an invalid piece.
    std::optional<Message> next();

    /// Number of slots that messages hold, whether or not the messages have been taken.
    std::uint32_t num_held() const noexcept { return shared_->num_held.load(); }

  private:
    /// The state that outlives the inbox until the last message releases its slot.
    struct Shared {
        explicit Shared(Arena a) : arena(std::move(a)) {}
        void release(std::uint32_t slot) noexcept;

        Arena arena;
        std::atomic<std::uint32_t> num_held{0};
        std::shared_ptr<ProcessBell> sender_bell;
        /// Identifies forked children: messages that a child releases still belong to its parent.
        const Process process;
    };

    Descriptor check(std::uint32_t slot) const;
    Message take_whole(std::uint32_t slot, const Descriptor& piece);
    std::optional<Message> add_piece(std::uint32_t slot, const Descriptor& piece);

    int source_;
    std::shared_ptr<Shared> shared_;
    Assembly assembly_;
};

}  // namespace megatron_ext
