#pragma once

#include <unistd.h>

#include <utility>

namespace megatron_ext {

/// Owns one file descriptor and closes it on destruction. Movable, not copyable; not synchronised,
/// like any value type.
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

    /// The descriptor, still owned by this object; -1 if it owns no descriptor.
    int get() const noexcept { return fd_; }
    explicit operator bool() const noexcept { return fd_ >= 0; }

    /// Passes ownership of the descriptor to the caller, which must close it.
    [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }

    /// Closes the owned descriptor, then owns `fd`. close() is not repeated after EINTR: on Linux
    /// the descriptor is closed by then, and another thread may already use its number.
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
