#include "core/process_bell.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <utility>

#include "core/errors.h"

namespace megatron_ext {

/// Words for different purposes are on different cache lines. All are initially zero.
struct ProcessBell::Page {
    alignas(64) std::uint32_t bell;
    /// Number of the owner's threads that sleep on the bell, or are about to sleep on it.
    alignas(64) std::atomic<std::uint32_t> sleepers;
    std::atomic<std::uint32_t> listens;
    alignas(64) std::atomic<std::uint32_t> control_news;
    /// 1 + the CPU of the last ring; 0 if there was no ring or its CPU is unknown.
    alignas(64) std::atomic<std::uint32_t> ringer_cpu;
};

namespace {

/// 1 + the CPU of the caller; 0 if unknown. With a current libc, this is not a system call.
std::uint32_t current_cpu() noexcept { return static_cast<std::uint32_t>(::sched_getcpu() + 1); }

/// Tells the CPU that the caller is in a spin loop.
void pause() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

ProcessBell::ProcessBell(Segment page, UniqueFd event)
    : page_(std::move(page)),
      event_(std::move(event)),
      bell_(&static_cast<Page*>(page_.data())->bell) {}

ProcessBell ProcessBell::create() {
    UniqueFd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!event) {
        const int error_number = errno;
        throw_errno("cannot create an eventfd", error_number);
    }
    return ProcessBell(Segment::create(sizeof(Page)), std::move(event));
}

ProcessBell ProcessBell::attach(UniqueFd page, UniqueFd event) {
    Segment segment = Segment::attach(std::move(page));
    if (segment.size_bytes() != sizeof(Page)) {
        throw TransportError("cannot attach a bell of " + std::to_string(segment.size_bytes()) +
                             " bytes; install the same megatron_ext on all ranks");
    }
    return ProcessBell(std::move(segment), std::move(event));
}

ProcessBell::Page& ProcessBell::page() const noexcept { return *static_cast<Page*>(page_.data()); }

// A ringer increments the count, then reads `sleepers`; a sleeper increments `sleepers`, then reads
// the count (for a futex, the kernel reads it). In the total order of these accesses, at least one
// of the two sees the other's access.
//
// The CPU is stored before the count, but only as a hint: a stale value costs a futile spin or an
// avoidable sleep.
void ProcessBell::ring() noexcept {
    const std::uint32_t cpu = current_cpu();
    if (page().ringer_cpu.load(std::memory_order_relaxed) != cpu) {
        page().ringer_cpu.store(cpu, std::memory_order_relaxed);
    }
    bell_.count();
    if (page().sleepers.load(std::memory_order_seq_cst) != 0) {
        bell_.wake();
    }
    if (page().listens.load(std::memory_order_seq_cst) != 0) {
        wake_service();
    }
}

void ProcessBell::ring_for_control() noexcept {
    page().control_news.fetch_add(1, std::memory_order_seq_cst);
    ring();
}

void ProcessBell::wake_service() noexcept {
    const std::uint64_t one = 1;
    // This fails only if the counter is at its maximum, and then the eventfd is readable anyway.
    [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof(one));
}

bool ProcessBell::wait(std::uint32_t seen, Deadline deadline, InterruptCheck check) {
    struct Sleeper {
        explicit Sleeper(std::atomic<std::uint32_t>& c) : count(c) { count.fetch_add(1); }
        ~Sleeper() { count.fetch_sub(1); }
        std::atomic<std::uint32_t>& count;
    };
    const Sleeper sleeper(page().sleepers);
    return bell_.wait(seen, deadline, check);
}

// A spinning thread does not count as a sleeper, so a ring during the spin wakes nobody. No ring is
// lost: either this loop sees it, or wait() does, which compares the count with `seen` again before
// it sleeps.
bool ProcessBell::spin(std::uint32_t seen, Clock::duration longest) const noexcept {
    const std::uint32_t ringer_cpu = page().ringer_cpu.load(std::memory_order_relaxed);
    if (longest <= Clock::duration::zero() || ringer_cpu == 0 || ringer_cpu == current_cpu()) {
        return bell_.sequence() != seen;
    }
    constexpr int kLooksForEachTime = 16;  // a read of the clock takes as long as several looks
    const Deadline end = Clock::now() + longest;
    do {
        for (int i = 0; i < kLooksForEachTime; ++i) {
            if (bell_.sequence() != seen) {
                return true;
            }
            pause();
        }
    } while (Clock::now() < end);
    return false;
}

void ProcessBell::listen(bool wanted) noexcept {
    page().listens.store(wanted ? 1 : 0, std::memory_order_seq_cst);
}

std::uint32_t ProcessBell::control_news() const noexcept {
    return page().control_news.load(std::memory_order_seq_cst);
}

void ProcessBell::clear_event() noexcept {
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t num_bytes = ::read(event_.get(), &count, sizeof(count));
}

}  // namespace megatron_ext
