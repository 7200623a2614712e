#pragma once

namespace megatron_ext {

/// Closes a connection in forked children during the guard's lifetime.
///
/// A child, such as a data loader's worker, inherits the descriptors of its parent. If it outlives
/// the parent, it keeps connections open, and the parent's peers do not notice that the parent has
/// died. So at the fork, the guard replaces the child's copy of the descriptor with /dev/null. The
/// number stays in use, so the object that owns the descriptor in the child may still close it.
///
/// Concurrency: any thread may create and destroy guards.
class ForkGuard {
  public:
    /// `fd` must stay open as long as the guard exists. Throws TransportError if forks cannot be
    /// intercepted.
    explicit ForkGuard(int fd);
    ForkGuard(const ForkGuard&) = delete;
    ForkGuard& operator=(const ForkGuard&) = delete;
    ~ForkGuard();

  private:
    int fd_;
};

}  // namespace megatron_ext
