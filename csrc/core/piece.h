#pragma once

#include <cstddef>
#include <cstdint>

#include "core/message.h"

namespace megatron_ext {

inline constexpr std::uint32_t kDescriptorMagic = 0x4D455831;  // MEX1

/// The header of a message, or of a piece of a message, on every wire.
struct Descriptor {
    std::uint32_t magic;
    std::uint8_t dtype_code;
    std::uint8_t dtype_bits;
    std::uint8_t num_dims;
    std::uint8_t has_checksum;
    std::uint64_t sequence;  ///< counts the pieces from one process to another, from 0
    std::uint64_t tag;
    std::uint64_t total_bytes;   ///< of the whole message
    std::uint64_t offset_bytes;  ///< of this piece in it
    std::uint64_t piece_bytes;
    std::uint64_t checksum;  ///< of the bytes of this piece
    std::int64_t shape[kMaxDims];
    std::uint64_t own_checksum;  ///< of all fields above
};
static_assert(sizeof(Descriptor) == 128, "part of the protocol");

/// Sets the checksum of a descriptor itself, after which the descriptor must not change. Every
/// descriptor has this checksum, because the bytes after a damaged descriptor cannot be parsed.
void seal(Descriptor& piece) noexcept;

/// Returns whether a descriptor matches its checksum.
bool is_intact(const Descriptor& piece) noexcept;

/// Returns the descriptor for the `piece_bytes` bytes of a message that start at `offset_bytes` and
/// are stored at `bytes`.
Descriptor describe_piece(const MessageInfo& info, std::uint64_t sequence,
                          std::uint64_t offset_bytes, std::uint64_t piece_bytes,
                          const std::byte* bytes, bool with_checksum);

/// The metadata of the message to which a piece belongs.
MessageInfo info_of(const Descriptor& piece);

/// A checksum that detects damaged, swapped and missing bytes; not cryptographic.
std::uint64_t checksum(const void* bytes, std::size_t num_bytes) noexcept;

}  // namespace megatron_ext
