#pragma once

#include <unistd.h>

#include <utility>

namespace megatron_ext {

/// Owns one file descriptor and closes it at the end of its life. Movable, not copyable; not
/// synchronised, like any value type.
class UniqueFd {
  public:
    UniqueFd() noexcept = default;
    explicit UniqueFd(int fd) noexcept : fd_(fd) {}
    UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
    UniqueFd& operator=(UniqueFd&& other) noexcept {
        if (this != &other) {
            reset(other.release());
        }
        return *this;
    }
    ~UniqueFd() { reset(); }

    /// The descriptor, still owned by this object; -1 if it owns none.
    int get() const noexcept { return fd_; }
    explicit operator bool() const noexcept { return fd_ >= 0; }

    /// Hands the descriptor over to the caller, who closes it.
    [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }

    /// Closes what is owned, then owns `fd`. close() is not repeated after EINTR: on Linux the
    /// descriptor is gone by then, and its number may already belong to another thread.
    void reset(int fd = -1) noexcept {
        const int old_fd = std::exchange(fd_, fd);
        if (old_fd >= 0) {
            ::close(old_fd);
        }
    }

  private:
    int fd_ = -1;
};

}  // namespace megatron_ext
