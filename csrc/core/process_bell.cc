#include "core/process_bell.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>
#include <utility>

#include "core/errors.h"

namespace megatron_ext {

/// Words of different purpose are cache lines apart. All are zero at first.
struct ProcessBell::Page {
    alignas(64) std::uint32_t bell;
    /// Threads of the owner that sleep on the bell, or are about to.
    alignas(64) std::atomic<std::uint32_t> sleepers;
    std::atomic<std::uint32_t> listens;
    alignas(64) std::atomic<std::uint32_t> control_news;
};

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
                             " bytes; install the same megatron_ext for all ranks");
    }
    return ProcessBell(std::move(segment), std::move(event));
}

ProcessBell::Page& ProcessBell::page() const noexcept { return *static_cast<Page*>(page_.data()); }

// Who rings first counts, then looks whether anybody sleeps; who goes to sleep first says so, then
// looks at the count (the kernel does, for a futex). In the one total order of these accesses one
// of the two sees the other.
void ProcessBell::ring() noexcept {
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
    // Fails only if the count is at its end, and then the eventfd is readable anyway.
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
