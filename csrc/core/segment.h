#pragma once

#include <cstddef>

#include "core/unique_fd.h"

namespace megatron_ext {

/// Memory shared between processes: one anonymous file (memfd), mapped once for each Segment
/// object.
///
/// One process calls create() and passes fd() to others (see fd_passing.h), which call attach().
/// The memory has no name in /dev/shm or anywhere else. The kernel frees the memory when the last
/// mapping and the last descriptor are gone, no matter how the processes exited, so there is
/// nothing to clean up. create() allocates all pages, so running out of memory is an error there
/// and never a SIGBUS later. The size is sealed: no process can shrink or grow it.
///
/// Ownership: a Segment owns its mapping and its descriptor; pointers into data() become invalid
/// when the Segment is destroyed. Objects in different processes, and several objects in one
/// process, are independent of each other. Concurrency: any thread may call every member. The bytes
/// are not synchronised: processes that share them need atomics or a Doorbell. After fork(), parent
/// and child share the mapping.
class Segment {
  public:
    /// Creates a segment of `size_bytes` zero bytes. Throws std::invalid_argument for 0 or an
    /// unusable size, and TransportError with the number of bytes if there is not enough memory.
    static Segment create(std::size_t size_bytes);

    /// Maps the segment behind `fd` and takes ownership of `fd`, even if it throws. Throws
    /// TransportError unless `fd` is a complete, sealed segment of this version of the package.
    static Segment attach(UniqueFd fd);

    Segment(Segment&& other) noexcept;
    Segment& operator=(Segment&& other) noexcept;
    ~Segment();

    /// First byte, aligned to 4096; readable and writable, shared.
    void* data() const noexcept;

    /// Number of usable bytes at data(), as given to create().
    std::size_t size_bytes() const noexcept { return size_bytes_; }

    /// The descriptor to pass to other processes; owned by the Segment, close-on-exec.
    int fd() const noexcept { return fd_.get(); }

  private:
    Segment(UniqueFd fd, void* mapping, std::size_t size_bytes) noexcept;
    void unmap() noexcept;

    UniqueFd fd_;
    void* mapping_ = nullptr;  // header page, then the payload
    std::size_t size_bytes_ = 0;
};

}  // namespace megatron_ext
