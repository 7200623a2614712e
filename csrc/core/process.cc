#include "core/process.h"

#include <pthread.h>
#include <unistd.h>

#include "core/errors.h"

namespace megatron_ext {

std::atomic<std::uint32_t> Process::num_forks{0};

void Process::count_fork() noexcept { num_forks.fetch_add(1, std::memory_order_relaxed); }

Process::Process() : forks_(num_forks.load(std::memory_order_relaxed)), id_(::getpid()) {
    static const int error_number = ::pthread_atfork(nullptr, nullptr, &count_fork);
    if (error_number != 0) {
        throw_errno("cannot prepare for forks", error_number);
    }
}

}  // namespace megatron_ext
