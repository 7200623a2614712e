#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace megatron_ext {

/// Remembers the process it was made in, to tell that from its forked children. Costs one load:
/// getpid(), which is a system call, would be a tenth of the time of a message.
///
/// Concurrency: any thread. Children made by a bare clone() are not told apart; fork() of libc and
/// all that Python offers are.
class Process {
  public:
    /// The calling one. Throws TransportError if forks cannot be noticed.
    Process();

    /// Whether the caller is that process, and not a child of it.
    bool is_this() const noexcept { return forks_ == num_forks.load(std::memory_order_relaxed); }

    pid_t id() const noexcept { return id_; }

  private:
    static void count_fork() noexcept;

    /// Forks between the first process of the program and this one.
    static std::atomic<std::uint32_t> num_forks;

    std::uint32_t forks_;
    pid_t id_;
};

}  // namespace megatron_ext
