#include "core/fork_guard.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <vector>

#include "core/errors.h"

namespace megatron_ext {
namespace {

/// The descriptors to replace in a child. Never destroyed, because a fork may happen at any time.
struct Guarded {
    std::mutex mutex;
    std::vector<int> fds;
    int null_fd = -1;
};

Guarded& guarded() {
    static auto* const all = new Guarded;
    return *all;
}

void before_fork() { guarded().mutex.lock(); }

void in_parent() { guarded().mutex.unlock(); }

void in_child() {
    for (const int fd : guarded().fds) {
        ::dup3(guarded().null_fd, fd, O_CLOEXEC);
    }
    guarded().fds.clear();
    guarded().mutex.unlock();
}

void install(Guarded& all) {
    const int fd = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        const int error_number = errno;
        throw_errno("cannot open /dev/null", error_number);
    }
    if (const int error_number = ::pthread_atfork(&before_fork, &in_parent, &in_child)) {
        ::close(fd);
        throw_errno("cannot prepare for forks", error_number);
    }
    all.null_fd = fd;
}

}  // namespace

ForkGuard::ForkGuard(int fd) : fd_(fd) {
    Guarded& all = guarded();
    const std::lock_guard lock(all.mutex);
    if (all.null_fd < 0) {
        install(all);
    }
    all.fds.push_back(fd);
}

ForkGuard::~ForkGuard() {
    Guarded& all = guarded();
    const std::lock_guard lock(all.mutex);
    const auto position = std::find(all.fds.begin(), all.fds.end(), fd_);
    if (position != all.fds.end()) {  // false in a child
        all.fds.erase(position);
    }
}

}  // namespace megatron_ext
