#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/buffer_pool.h"
#include "core/message.h"
#include "core/piece.h"

namespace megatron_ext {

/// Assembles a peer's messages from pieces, which arrive in sending order. Not synchronised.
class Assembly {
  public:
    /// `source` is used only in error messages.
    Assembly(int source, BufferPool pool);

    /// Number of the next piece.
    std::uint64_t next_sequence() const noexcept { return next_sequence_; }

    /// Throws TransportError if a descriptor is damaged, does not belong to the next piece or
    /// exceeds `max_piece_bytes`.
    void check(const Descriptor& piece, std::uint64_t max_piece_bytes) const;

    /// Throws TransportError if the checksum of the bytes differs from the checksum in the
    /// descriptor.
    void check_bytes(const Descriptor& piece, const std::byte* bytes) const;

    /// Counts a piece that is a whole message and is stored elsewhere. Call check() first.
    void skip() { ++next_sequence_; }

    /// Returns memory for the whole message that a piece with bytes belongs to. Throws
    /// TransportError, with the source and the size, if this process cannot allocate that much.
    std::shared_ptr<std::byte> memory_for(const Descriptor& piece) const;

    /// Destination of the next piece's bytes; null if it has no bytes. Call check() first. Throws
    /// like memory_for().
    std::byte* place(const Descriptor& piece);

    /// Called once the next piece's bytes are in place. Returns the message if this completes it.
    std::optional<Message> finish(const Descriptor& piece);

  private:
    [[noreturn]] void throw_damaged(const std::string& what) const;

    /// A message that is still missing some of its pieces.
    struct Partial {
        Message message;
        std::uint64_t have_bytes = 0;
    };

    int source_;
    BufferPool pool_;
    std::uint64_t next_sequence_ = 0;
    std::optional<Partial> partial_;
};

}  // namespace megatron_ext
