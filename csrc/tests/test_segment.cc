#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <utility>

#include "check.h"
#include "core/errors.h"
#include "core/segment.h"

using namespace megatron_ext;
using megatron_ext::testing::fork_child;
using megatron_ext::testing::join_child;

namespace {

constexpr off_t kHeaderBytes = 4096;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

UniqueFd duplicate(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

/// A memfd of `file_bytes` with the header of a real segment of 100 bytes. The 4 bytes of the
/// header at `patch_offset` are overwritten.
UniqueFd forge(off_t file_bytes, off_t patch_offset, std::uint32_t patch, int seals = kSeals) {
    char header[24];
    const Segment real = Segment::create(100);
    CHECK(::pread(real.fd(), header, sizeof(header), 0) == sizeof(header));
    std::memcpy(header + patch_offset, &patch, sizeof(patch));
    UniqueFd fd(::memfd_create("forged", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    CHECK(::pwrite(fd.get(), header, sizeof(header), 0) == sizeof(header));
    CHECK(::ftruncate(fd.get(), file_bytes) == 0);
    CHECK(::fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
    return fd;
}

bool mapped_here() {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        if (line.find("memfd:megatron_ext") != std::string::npos) {
            return true;
        }
    }
    return false;
}

}  // namespace

TEST(a_new_segment_is_zero_aligned_and_allocated) {
    const Segment segment = Segment::create(3 << 20);
    CHECK_EQ(segment.size_bytes(), std::size_t{3} << 20);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(segment.data()) % 4096, 0U);
    const char* bytes = static_cast<const char*>(segment.data());
    for (std::size_t i = 0; i < segment.size_bytes(); ++i) {
        CHECK(bytes[i] == 0);
    }
    struct stat status{};
    CHECK(::fstat(segment.fd(), &status) == 0);
    CHECK(status.st_blocks * 512 >= status.st_size);
    CHECK((::fcntl(segment.fd(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST(attached_segments_share_their_bytes) {
    const Segment first = Segment::create(5000);
    const Segment second = Segment::attach(duplicate(first.fd()));
    CHECK(first.data() != second.data());
    CHECK_EQ(second.size_bytes(), 5000U);
    static_cast<char*>(first.data())[4999] = 42;
    CHECK_EQ(int{static_cast<char*>(second.data())[4999]}, 42);
}

TEST(a_forked_child_shares_the_bytes) {
    const Segment segment = Segment::create(1);
    CHECK_EQ(join_child(fork_child([&] { *static_cast<char*>(segment.data()) = 9; })), 0);
    CHECK_EQ(int{*static_cast<char*>(segment.data())}, 9);
}

TEST(moving_moves_the_only_owner_and_the_end_unmaps) {
    CHECK(!mapped_here());
    int old_fd = -1;
    {
        Segment first = Segment::create(10);
        Segment second = Segment::create(20);
        old_fd = second.fd();
        second = std::move(first);
        CHECK_EQ(second.size_bytes(), 10U);
        CHECK(::fcntl(old_fd, F_GETFD) == -1);
        const Segment third(std::move(second));
        CHECK_EQ(third.size_bytes(), 10U);
        CHECK(mapped_here());
    }
    CHECK(!mapped_here());
}

TEST(a_failed_attach_closes_its_descriptor) {
    UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const int number = fd.get();
    CHECK_THROWS(Segment::attach(std::move(fd)), TransportError, "not a sealed memfd");
    CHECK(::fcntl(number, F_GETFD) == -1);
    CHECK_THROWS(Segment::attach(UniqueFd()), TransportError, "no descriptor");
}

TEST(the_size_is_sealed_for_everybody) {
    const Segment segment = Segment::create(10000);
    CHECK(::ftruncate(segment.fd(), 0) == -1);
    CHECK(::ftruncate(segment.fd(), 1 << 20) == -1);
    CHECK(::fallocate(segment.fd(), 0, 0, 1 << 20) == -1);
    CHECK(::fcntl(segment.fd(), F_ADD_SEALS, F_SEAL_WRITE) == -1);
    static_cast<char*>(segment.data())[9999] = 1;  // would be SIGBUS after a truncation
}

TEST(foreign_and_damaged_files_are_refused) {
    constexpr off_t kFileBytes = kHeaderBytes + 100;
    CHECK_EQ(Segment::attach(forge(kFileBytes, 12, 4096)).size_bytes(), 100U);  // unchanged: valid
    const auto attach = [](UniqueFd fd) { return Segment::attach(std::move(fd)); };
    CHECK_THROWS(attach(forge(kFileBytes, 0, 1)), TransportError, "lacks the header");
    CHECK_THROWS(attach(forge(kFileBytes, 8, 99)), TransportError, "layout version 99");
    CHECK_THROWS(attach(forge(kFileBytes, 12, 64)), TransportError, "layout version");
    CHECK_THROWS(attach(forge(kFileBytes, 16, 101)), TransportError, "says 101 bytes");
    CHECK_THROWS(attach(forge(kFileBytes - 1, 12, 4096)), TransportError, "the file has 99 bytes");
    CHECK_THROWS(attach(forge(kFileBytes + 1, 12, 4096)), TransportError, "the file has 101 bytes");
    CHECK_THROWS(attach(forge(kHeaderBytes, 12, 4096)), TransportError, "has 4096 bytes");
    CHECK_THROWS(attach(forge(0, 12, 4096)), TransportError, "has 0 bytes");
    CHECK_THROWS(attach(forge(kFileBytes, 12, 4096, F_SEAL_GROW)), TransportError, "not a sealed");
}

TEST(impossible_sizes_are_refused) {
    CHECK_THROWS(Segment::create(0), std::invalid_argument, "got 0");
    CHECK_THROWS(Segment::create(std::numeric_limits<std::size_t>::max()), std::invalid_argument,
                 "got 18446744073709551615");
}

TEST(too_little_memory_is_an_error_with_the_number_of_bytes) {
    CHECK_THROWS(Segment::create(std::size_t{1} << 60), TransportError,
                 "segment of 1152921504606846976 bytes");
    CHECK(!mapped_here());
}

TEST(a_resource_limit_is_an_error_and_not_a_signal) {
    const pid_t child = fork_child([] {
        const rlimit one_mebibyte{1 << 20, 1 << 20};
        CHECK(::setrlimit(RLIMIT_FSIZE, &one_mebibyte) == 0);
        CHECK_THROWS(Segment::create(2 << 20), TransportError,
                     "RLIMIT_FSIZE (ulimit -f) leaves 1048576");
        Segment::create(1 << 19);
        const rlimit no_descriptor{0, 0};
        CHECK(::setrlimit(RLIMIT_NOFILE, &no_descriptor) == 0);
        CHECK_THROWS(Segment::create(100), TransportError, "Too many open files");
    });
    CHECK_EQ(join_child(child), 0);
}

TEST(a_killed_process_leaves_the_segment_whole_for_the_others) {
    const Segment segment = Segment::create(1 << 20);
    const pid_t child = fork_child([&] {
        const Segment own = Segment::attach(duplicate(segment.fd()));
        for (;;) {
            std::memset(own.data(), 1, own.size_bytes());
            *static_cast<volatile char*>(segment.data()) = 2;
        }
    });
    while (*static_cast<volatile char*>(segment.data()) == 0) {
        ::usleep(1000);
    }
    CHECK(::kill(child, SIGKILL) == 0);
    CHECK(WIFSIGNALED(join_child(child)));
    std::memset(segment.data(), 3, segment.size_bytes());
    CHECK_EQ(Segment::attach(duplicate(segment.fd())).size_bytes(), segment.size_bytes());
}
