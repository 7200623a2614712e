#pragma once

#include <atomic>
#include <cstdint>

#include "core/wait.h"

namespace megatron_ext {

/// Wakes threads, by futex, in all processes that share one 32-bit word of memory. Waiting threads
/// sleep.
///
/// The word is a sequence number that ring() increments. A waiter that must not lose a wake-up does
///
///     seen = bell.sequence();
///     while (!condition()) { bell.wait(seen, deadline); seen = bell.sequence(); }
///
/// and the thread that makes the condition true does so *before* it calls ring(): the kernel
/// compares the word with `seen` and goes to sleep in one step, so a ring between sequence() and
/// wait() makes wait() return at once.
///
/// Ownership: the word is borrowed and must outlive the Doorbell; any number of Doorbells, in any
/// number of processes, may use the same word. A fresh segment contains zeros, which is a valid
/// initial word. Concurrency: any thread may call every member at any time. Everything that a
/// thread wrote before ring() is visible to a thread whose sequence() or wait() has seen that ring.
/// The death of a process leaves no state behind: a ring either happened or did not, and waiters
/// are not counted. Exactly 2^32 rings between sequence() and wait() go unnoticed.
class Doorbell {
  public:
    /// `word` points to 4 zeroed or shared bytes, aligned to 4. Otherwise, throws
    /// std::invalid_argument.
    explicit Doorbell(void* word);

    /// Number of rings so far, modulo 2^32.
    std::uint32_t sequence() const noexcept;

    /// Counts one ring and wakes all waiters.
    void ring() noexcept;

    /// The two halves of ring(), for callers that can determine whether any thread sleeps.
    void count() noexcept;
    void wake() noexcept;

    /// Sleeps until the sequence differs from `seen`. Returns false at `deadline`.
    /// Signals do not end the wait, unless `check` throws. Throws TransportError if the word cannot
    /// be waited on.
    bool wait(std::uint32_t seen, Deadline deadline = kNever, InterruptCheck check = nullptr) const;

  private:
    static_assert(sizeof(std::atomic<std::uint32_t>) == sizeof(std::uint32_t) &&
                      std::atomic<std::uint32_t>::is_always_lock_free,
                  "a futex word must be a plain 32-bit integer");

    std::atomic<std::uint32_t>* word_;
};

}  // namespace megatron_ext
