#include "core/doorbell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>
#include <stdexcept>

#include "core/errors.h"

namespace megatron_ext {
namespace {

timespec to_timespec(Deadline deadline) {
    const auto since_boot = deadline.time_since_epoch();
    const auto whole = std::chrono::floor<std::chrono::seconds>(since_boot);
    timespec result{};
    result.tv_sec = static_cast<time_t>(whole.count());
    result.tv_nsec =
        std::chrono::duration_cast<std::chrono::nanoseconds>(since_boot - whole).count();
    return result;
}

/// Sleeps once while *word == seen, until `deadline`. Returns on a wake-up, on a signal, at the
/// deadline or spuriously: the caller checks the word again. FUTEX_WAIT_BITSET is FUTEX_WAIT with
/// an absolute monotonic time-out; without FUTEX_PRIVATE_FLAG, other processes can also wake the
/// sleeper.
void sleep_while_equal(const std::atomic<std::uint32_t>* word, std::uint32_t seen,
                       Deadline deadline) {
    timespec until{};
    timespec* timeout = nullptr;
    if (deadline != kNever) {
        until = to_timespec(deadline);
        timeout = &until;
    }
    const long result = ::syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, timeout, nullptr,
                                  FUTEX_BITSET_MATCH_ANY);
    const int error_number = errno;
    if (result != 0 && error_number != EAGAIN && error_number != EINTR &&
        error_number != ETIMEDOUT) {
        throw_errno("cannot wait on a doorbell in shared memory", error_number);
    }
}

}  // namespace

Doorbell::Doorbell(void* word) : word_(static_cast<std::atomic<std::uint32_t>*>(word)) {
    if (word == nullptr || reinterpret_cast<std::uintptr_t>(word) % sizeof(std::uint32_t) != 0) {
        throw std::invalid_argument("a doorbell needs the address of a word aligned to 4 bytes");
    }
}

std::uint32_t Doorbell::sequence() const noexcept { return word_->load(std::memory_order_seq_cst); }

void Doorbell::ring() noexcept {
    count();
    // If no thread sleeps, a wake-up only costs a system call, and no state can be inconsistent.
    wake();
}

void Doorbell::count() noexcept { word_->fetch_add(1, std::memory_order_seq_cst); }

void Doorbell::wake() noexcept {
    // This cannot fail for a mapped word.
    ::syscall(SYS_futex, word_, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Doorbell::wait(std::uint32_t seen, Deadline deadline, InterruptCheck check) const {
    while (sequence() == seen) {
        if (Clock::now() >= deadline) {
            return false;
        }
        sleep_while_equal(word_, seen, end_of_sleep(deadline, check));
        if (check != nullptr && sequence() == seen) {
            check();
        }
    }
    return true;
}

}  // namespace megatron_ext
