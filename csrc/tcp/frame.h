#pragma once

#include <cstddef>
#include <cstdint>

#include "core/piece.h"

namespace megatron_ext {

// A TCP link carries a sequence of frames: a descriptor, whose magic gives the frame's kind, and
// its bytes. A piece of a message has the same descriptor on every wire. Control frames use only a
// few of the fields, and their text always has a checksum:
inline constexpr std::uint32_t kRoomMagic = 0x4D455252;     ///< total_bytes: cost that may be sent
inline constexpr std::uint32_t kClosedMagic = 0x4D455243;   ///< no frame follows
inline constexpr std::uint32_t kAbortedMagic = 0x4D455241;  ///< piece_bytes of a reason follow

inline constexpr std::uint64_t kMaxReasonBytes = 4096;

/// Longer messages are sent in pieces of this size, so that other frames can be sent between the
/// pieces.
inline constexpr std::uint64_t kTcpPieceBytes = std::uint64_t{1} << 19;

/// Cost that a sender may use before the receiver grants more. With a lower value, a sender of tiny
/// messages would wait needlessly.
inline constexpr std::uint64_t kFirstRoom = std::uint64_t{4} << 20;

/// The room that a piece takes up at the receiver, in bytes. Tiny pieces have a minimum cost.
constexpr std::uint64_t cost_of_piece(std::uint64_t num_bytes) noexcept { return num_bytes + 256; }

/// The total cost of a message's pieces.
constexpr std::uint64_t cost_of_message(std::uint64_t num_bytes) noexcept {
    const std::uint64_t last_piece_bytes = num_bytes % kTcpPieceBytes;
    const std::uint64_t cost_of_full = num_bytes / kTcpPieceBytes * cost_of_piece(kTcpPieceBytes);
    const bool has_last_piece = last_piece_bytes != 0 || num_bytes == 0;
    return has_last_piece ? cost_of_full + cost_of_piece(last_piece_bytes) : cost_of_full;
}

}  // namespace megatron_ext
