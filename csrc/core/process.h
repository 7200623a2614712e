#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace megatron_ext {

/// Remembers the process that created it, to distinguish this process from forked children. A check
/// costs one load; a getpid() system call would take a tenth as long as a message.
///
/// Concurrency: any thread may call every member. The class detects the children of libc's fork()
/// and of all of Python's functions, but not those of a bare clone().
class Process {
  public:
    /// Remembers the calling process. Throws TransportError if forks cannot be detected.
    Process();

    /// Returns whether the caller is the remembered process rather than a forked child.
    bool is_this() const noexcept { return forks_ == num_forks.load(std::memory_order_relaxed); }

    pid_t id() const noexcept { return id_; }

  private:
    static void count_fork() noexcept;

    /// Number of forks between the program's first process and this one.
    static std::atomic<std::uint32_t> num_forks;

    std::uint32_t forks_;
    pid_t id_;
};

}  // namespace megatron_ext
