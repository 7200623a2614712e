#include "core/piece.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>

namespace megatron_ext {

Descriptor describe_piece(const MessageInfo& info, std::uint64_t sequence,
                          std::uint64_t offset_bytes, std::uint64_t piece_bytes,
                          const std::byte* bytes, bool with_checksum) {
    Descriptor piece{};
    piece.magic = kDescriptorMagic;
    piece.dtype_code = info.dtype_code;
    piece.dtype_bits = info.dtype_bits;
    piece.num_dims = info.num_dims;
    piece.sequence = sequence;
    piece.tag = info.tag;
    piece.total_bytes = info.num_bytes;
    piece.offset_bytes = offset_bytes;
    piece.piece_bytes = piece_bytes;
    std::copy(info.shape.begin(), info.shape.end(), std::begin(piece.shape));
    if (with_checksum && piece_bytes > 0) {
        piece.has_checksum = 1;
        piece.checksum = checksum(bytes, static_cast<std::size_t>(piece_bytes));
    }
    seal(piece);
    return piece;
}

void seal(Descriptor& piece) noexcept {
    piece.own_checksum = checksum(&piece, offsetof(Descriptor, own_checksum));
}

bool is_intact(const Descriptor& piece) noexcept {
    return piece.own_checksum == checksum(&piece, offsetof(Descriptor, own_checksum));
}

MessageInfo info_of(const Descriptor& piece) {
    MessageInfo info;
    info.tag = piece.tag;
    info.num_bytes = piece.total_bytes;
    info.dtype_code = piece.dtype_code;
    info.dtype_bits = piece.dtype_bits;
    info.num_dims = piece.num_dims;
    std::copy(std::begin(piece.shape), std::end(piece.shape), info.shape.begin());
    return info;
}

std::uint64_t checksum(const void* bytes, std::size_t num_bytes) noexcept {
    constexpr std::uint64_t kPrime = 0x100000001B3U;
    std::uint64_t sum = 0xCBF29CE484222325U ^ num_bytes;
    const auto* next = static_cast<const unsigned char*>(bytes);
    for (; num_bytes >= sizeof(std::uint64_t); num_bytes -= sizeof(std::uint64_t)) {
        std::uint64_t word = 0;
        std::memcpy(&word, next, sizeof(word));
        sum = (sum ^ word) * kPrime;
        sum ^= sum >> 29;
        next += sizeof(word);
    }
    for (; num_bytes > 0; --num_bytes) {
        sum = (sum ^ *next++) * kPrime;
    }
    return sum;
}

}  // namespace megatron_ext
