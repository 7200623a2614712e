#pragma once

#include <cstdint>

#include "core/doorbell.h"
#include "core/segment.h"
#include "core/unique_fd.h"
#include "core/wait.h"

namespace megatron_ext {

/// Wakes one process. Peers ring it through shared memory, and so do the process's own service
/// thread and any thread that releases a message.
///
/// It consists of a page of shared memory and an eventfd. The thread that calls the endpoint sleeps
/// on a futex in the page; the service thread sleeps in epoll, where rings reach it through the
/// eventfd if it listens. A ring costs a system call only for a thread that does sleep or listen:
/// the page says so. Each word has one side that clears it, so a death leaves nothing behind.
///
/// Concurrency: every member may be called by any thread. The object is shared by all that may ring
/// it, and outlives the endpoint with the messages that do.
class ProcessBell {
  public:
    /// A new bell, of this process.
    static ProcessBell create();

    /// The bell of another process, from the descriptors that it passed. Throws TransportError if
    /// they are not those of a bell.
    static ProcessBell attach(UniqueFd page, UniqueFd event);

    /// The descriptors to pass to another process.
    int page_fd() const noexcept { return page_.fd(); }
    int event_fd() const noexcept { return event_.get(); }

    /// Says that something changed: wakes the calling thread, and the service thread if it listens.
    void ring() noexcept;

    /// ring() that also tells of news on a control connection, which is read otherwise only now and
    /// then.
    void ring_for_control() noexcept;

    /// Wakes the service thread, whether it listens or not.
    void wake_service() noexcept;

    /// Rings so far: see Doorbell for how to wait without losing one.
    std::uint32_t sequence() const noexcept { return bell_.sequence(); }

    /// See Doorbell::wait().
    bool wait(std::uint32_t seen, Deadline deadline, InterruptCheck check);

    /// Spins for a ring after `seen`, if the last ring came from another CPU than the caller's: a
    /// ringer on the same CPU could not run meanwhile. Returns whether a ring came.
    bool spin(std::uint32_t seen, Clock::duration longest) const noexcept;

    /// Whether from now on rings are to reach the service thread. Look for what they would tell
    /// after this, then sleep.
    void listen(bool wanted) noexcept;

    /// Calls of ring_for_control() so far.
    std::uint32_t control_news() const noexcept;

    /// Makes the eventfd silent until the next ring.
    void clear_event() noexcept;

  private:
    struct Page;

    ProcessBell(Segment page, UniqueFd event);
    Page& page() const noexcept;

    Segment page_;
    UniqueFd event_;
    Doorbell bell_;
};

}  // namespace megatron_ext
