#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace megatron_ext {

/// Reusable memory of this process for messages: the first touch of fresh pages costs several times
/// as much as the copy into them.
///
/// Idle plus used memory never exceeds the earlier peak of used memory; idle memory above that is
/// freed, the longest idle first. Ownership: buffers may outlive the pool. Concurrency: any thread
/// may call every member and release every buffer.
class BufferPool {
  public:
    BufferPool();

    /// A buffer of at least `num_bytes` (> 0) of unspecified content, aligned to 4096, which
    /// returns to the pool with its last owner. Throws std::bad_alloc.
    std::shared_ptr<std::byte> take(std::size_t num_bytes) const;

    /// Idle memory in bytes.
    std::size_t idle_bytes() const;

  private:
    class State;
    std::shared_ptr<State> state_;
};

}  // namespace megatron_ext
