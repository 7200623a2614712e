#include "core/segment.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/memory_budget.h"

#ifndef MFD_NOEXEC_SEAL  // Linux 6.3
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace megatron_ext {
namespace {

constexpr std::size_t kHeaderBytes = 4096;
constexpr char kMagic[8] = {'M', 'E', 'X', 'T', 'S', 'E', 'G', '\n'};
constexpr std::uint32_t kVersion = 1;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

/// First bytes of every segment. The layout is part of the protocol: a change needs a new kVersion.
struct Header {
    char magic[8];
    std::uint32_t version;
    std::uint32_t header_bytes;
    std::uint64_t payload_bytes;
};
static_assert(sizeof(Header) == 24 && sizeof(Header) <= kHeaderBytes, "part of the protocol");

std::string bytes_text(std::uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

UniqueFd open_memfd(const std::string& failed) {
    const char* const name = "megatron_ext";  // only shown in /proc/PID/maps
    constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    UniqueFd fd(::memfd_create(name, kFlags | MFD_NOEXEC_SEAL));
    if (!fd &&
        errno == EINVAL) {  // a kernel without the flag does not require it either
        fd.reset(::memfd_create(name, kFlags));
    }
    if (!fd) {
        const int error_number = errno;
        throw_errno(failed + ": memfd_create", error_number);
    }
    return fd;
}

/// Sets the size of `fd` and allocates all of its memory. posix_fallocate reports missing memory as
/// an error number; after ftruncate, the first use of a missing page would raise SIGBUS.
void allocate(int fd, std::size_t file_bytes, const std::string& failed) {
    // A signal makes the kernel undo the whole interrupted call: small steps limit the lost work.
    constexpr std::size_t kStepBytes = std::size_t{64} << 20;
    for (std::size_t offset = 0; offset < file_bytes; offset += kStepBytes) {
        const std::size_t step = std::min(kStepBytes, file_bytes - offset);
        int error_number = EINTR;
        while (error_number == EINTR) {
            error_number =
                ::posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(step));
        }
        if (error_number != 0) {
            throw_errno(failed + "; ask for less or give this process more memory", error_number);
        }
    }
}

void* map(int fd, std::size_t file_bytes, const std::string& failed) {
    void* mapping = ::mmap(nullptr, file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapping == MAP_FAILED) {
        const int error_number = errno;
        throw_errno(failed + ": mmap", error_number);
    }
    return mapping;
}

/// The header of a file that is at least as long as one.
Header read_header(int fd, const std::string& failed) {
    Header header{};
    const ssize_t num_bytes = ::pread(fd, &header, sizeof(header), 0);
    if (num_bytes < 0) {
        const int error_number = errno;
        throw_errno(failed + ": reading its header", error_number);
    }
    return header;
}

/// Throws unless the file is a complete segment of this version. Checks the seals first: without
/// them the peer could change the size after its check.
Header check_segment(int fd, const std::string& failed) {
    const int seals = ::fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & kSeals) != kSeals) {
        throw TransportError(failed + ": it is not a sealed memfd, so not a megatron_ext segment");
    }
    struct stat status{};
    if (::fstat(fd, &status) != 0) {
        const int error_number = errno;
        throw_errno(failed + ": fstat", error_number);
    }
    const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
    if (file_bytes <= kHeaderBytes) {
        throw TransportError(failed + ": it has " + bytes_text(file_bytes) +
                             ", but a segment has more than " + bytes_text(kHeaderBytes));
    }
    const Header header = read_header(fd, failed);
    if (!std::equal(std::begin(kMagic), std::end(kMagic), std::begin(header.magic))) {
        throw TransportError(failed + ": it lacks the header of a megatron_ext segment");
    }
    if (header.version != kVersion || header.header_bytes != kHeaderBytes) {
        throw TransportError(failed + ": it has layout version " + std::to_string(header.version) +
                             ", but this process uses version " + std::to_string(kVersion) +
                             "; install the same megatron_ext on all ranks");
    }
    if (header.payload_bytes != file_bytes - kHeaderBytes) {
        throw TransportError(failed + ": its header says " + bytes_text(header.payload_bytes) +
                             " after the header, but the file has " +
                             bytes_text(file_bytes - kHeaderBytes));
    }
    return header;
}

}  // namespace

Segment Segment::create(std::size_t size_bytes) {
    constexpr auto kMaxBytes =
        static_cast<std::size_t>(std::numeric_limits<off_t>::max()) - kHeaderBytes;
    if (size_bytes == 0 || size_bytes > kMaxBytes) {
        throw std::invalid_argument("a shared-memory segment needs between 1 and " +
                                    bytes_text(kMaxBytes) + ", got " + std::to_string(size_bytes));
    }
    const std::size_t file_bytes = kHeaderBytes + size_bytes;
    const std::string failed = "cannot create a shared-memory segment of " + bytes_text(size_bytes);
    const MemoryBudget budget = shared_memory_budget();
    if (file_bytes > budget.available_bytes) {
        throw TransportError(failed + ": " + budget.limited_by + " leaves " +
                             bytes_text(budget.available_bytes) +
                             "; ask for less or raise that limit");
    }
    UniqueFd fd = open_memfd(failed);
    allocate(fd.get(), file_bytes, failed);
    void* mapping = map(fd.get(), file_bytes, failed);
    const int fd_number = fd.get();
    Segment segment(std::move(fd), mapping, size_bytes);  // unmaps if sealing fails
    Header header{};
    std::memcpy(header.magic, kMagic, sizeof(kMagic));
    header.version = kVersion;
    header.header_bytes = static_cast<std::uint32_t>(kHeaderBytes);
    header.payload_bytes = size_bytes;
    std::memcpy(mapping, &header, sizeof(header));
    if (::fcntl(fd_number, F_ADD_SEALS, kSeals) != 0) {
        const int error_number = errno;
        throw_errno(failed + ": sealing its size", error_number);
    }
    return segment;
}

Segment Segment::attach(UniqueFd fd) {
    const std::string failed = "cannot attach a shared-memory segment";
    if (!fd) {
        throw TransportError(failed + ": no descriptor");
    }
    const Header header = check_segment(fd.get(), failed);
    const auto size_bytes = static_cast<std::size_t>(header.payload_bytes);
    void* mapping = map(fd.get(), kHeaderBytes + size_bytes, failed);
    return Segment(std::move(fd), mapping, size_bytes);
}

Segment::Segment(UniqueFd fd, void* mapping, std::size_t size_bytes) noexcept
    : fd_(std::move(fd)), mapping_(mapping), size_bytes_(size_bytes) {}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::move(other.fd_)),
      mapping_(std::exchange(other.mapping_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
    if (this != &other) {
        unmap();
        fd_ = std::move(other.fd_);
        mapping_ = std::exchange(other.mapping_, nullptr);
        size_bytes_ = std::exchange(other.size_bytes_, 0);
    }
    return *this;
}

Segment::~Segment() { unmap(); }

void* Segment::data() const noexcept { return static_cast<char*>(mapping_) + kHeaderBytes; }

void Segment::unmap() noexcept {
    if (mapping_ != nullptr) {
        ::munmap(mapping_, kHeaderBytes + size_bytes_);
    }
}

}  // namespace megatron_ext
