#pragma once

namespace megatron_ext {

/// Closes a connection in forked children, during the guard's lifetime.
///
/// A child, such as a data loader's worker, inherits the descriptors of its parent. If it outlives
/// the parent it keeps connections open, and the peers do not see that their peer has died. Here
/// the child's copy of the descriptor is replaced by one of /dev/null, in the moment of the fork;
/// its number stays taken, so whoever owns it in the child may close it.
///
/// Concurrency: guards may be made and destroyed by any thread.
class ForkGuard {
  public:
    /// `fd` has to stay open as long as the guard. Throws TransportError if that is not possible.
    explicit ForkGuard(int fd);
    ForkGuard(const ForkGuard&) = delete;
    ForkGuard& operator=(const ForkGuard&) = delete;
    ~ForkGuard();

  private:
    int fd_;
};

}  // namespace megatron_ext
