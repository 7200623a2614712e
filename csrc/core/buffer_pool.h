#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace megatron_ext {

/// Memory of this process for messages, used again and again: the first touch of fresh pages costs
/// several times what the copy into them costs.
///
/// What is idle plus what is in use never exceeds what was in use at once before; idle memory above
/// that is freed, the longest idle first. Ownership: buffers may outlive the pool. Concurrency:
/// every member may be called, and every buffer be let go, by any thread.
class BufferPool {
  public:
    BufferPool();

    /// A buffer of at least `num_bytes` (> 0) of unspecified content, aligned to 4096, which
    /// returns to the pool with its last owner. Throws std::bad_alloc.
    std::shared_ptr<std::byte> take(std::size_t num_bytes) const;

    /// Bytes that wait to be used again.
    std::size_t idle_bytes() const;

  private:
    class State;
    std::shared_ptr<State> state_;
};

}  // namespace megatron_ext
