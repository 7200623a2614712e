#pragma once

#include <cstddef>
#include <cstdint>

#include "core/piece.h"

namespace megatron_ext {

// What goes over a TCP link is a sequence of frames: a descriptor, told apart by its magic, and its
// bytes. A piece of a message is one as on every wire. The others use few of the fields, and always
// have a checksum:
inline constexpr std::uint32_t kRoomMagic = 0x4D455252;     ///< total_bytes: cost that may be sent
inline constexpr std::uint32_t kClosedMagic = 0x4D455243;   ///< nothing will follow
inline constexpr std::uint32_t kAbortedMagic = 0x4D455241;  ///< piece_bytes of a reason follow

inline constexpr std::uint64_t kMaxReasonBytes = 4096;

/// Longer messages go in pieces of this size, so that other frames get in between.
inline constexpr std::uint64_t kTcpPieceBytes = std::uint64_t{1} << 19;

/// Cost that may be sent before the receiver has allowed any. Less would make a sender of tiny
/// messages wait for nothing.
inline constexpr std::uint64_t kFirstRoom = std::uint64_t{4} << 20;

/// Room that a piece takes at its receiver, in bytes: tiny ones are not for nothing.
constexpr std::uint64_t cost_of_piece(std::uint64_t num_bytes) noexcept { return num_bytes + 256; }

/// Sum of the costs of the pieces of a message.
constexpr std::uint64_t cost_of_message(std::uint64_t num_bytes) noexcept {
    const std::uint64_t rest = num_bytes % kTcpPieceBytes;
    const std::uint64_t whole = num_bytes / kTcpPieceBytes * cost_of_piece(kTcpPieceBytes);
    return rest == 0 && num_bytes != 0 ? whole : whole + cost_of_piece(rest);
}

}  // namespace megatron_ext
