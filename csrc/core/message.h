#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace megatron_ext {

inline constexpr std::size_t kMaxDims = 8;

/// The metadata of a message. The core carries dtype and shape but never interprets them; the dtype
/// is encoded as in DLPack.
struct MessageInfo {
    std::uint64_t tag = 0;
    std::uint64_t num_bytes = 0;
    std::uint8_t dtype_code = 0;
    std::uint8_t dtype_bits = 0;
    std::uint8_t num_dims = 0;
    std::array<std::int64_t, kMaxDims> shape{};
};

/// A message that has arrived. The last copy of `bytes` returns the memory to where it came from,
/// on the thread that destroys that copy. A message without bytes has a null pointer.
struct Message {
    MessageInfo info;
    std::shared_ptr<std::byte> bytes;
};

}  // namespace megatron_ext
