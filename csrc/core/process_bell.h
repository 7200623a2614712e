#pragma once

#include <cstdint>

#include "core/doorbell.h"
#include "core/segment.h"
#include "core/unique_fd.h"
#include "core/wait.h"

namespace megatron_ext {

/// Wakes one process. Peers ring it through shared memory, as do the process's service thread and
/// any thread that releases a message.
///
/// A bell consists of a page of shared memory and an eventfd. The thread that calls the endpoint
/// sleeps on a futex in the page; the service thread sleeps in epoll, where rings reach it through
/// the eventfd if it listens. A ring costs a system call only if a thread sleeps or listens, and
/// the page shows whether one does. Each word is cleared by only one process, so the death of a
/// process leaves nothing to clean up.
///
/// Concurrency: any thread may call every member. All objects that may ring the bell share it, so
/// it outlives the endpoint as long as there are unreleased messages.
class ProcessBell {
  public:
    /// Creates a bell of this process.
    static ProcessBell create();

    /// Opens the bell of another process from the descriptors that it passed. Throws TransportError
    /// if they do not belong to a bell.
    static ProcessBell attach(UniqueFd page, UniqueFd event);

    /// The descriptors to pass to another process.
    int page_fd() const noexcept { return page_.fd(); }
    int event_fd() const noexcept { return event_.get(); }

    /// Reports a change: wakes the calling thread, and the service thread if it listens.
    void ring() noexcept;

    /// Like ring(), but also reports news on a control connection, which is otherwise read only
    /// periodically.
    void ring_for_control() noexcept;

    /// Wakes the service thread even if it does not listen.
    void wake_service() noexcept;

    /// Number of rings so far: see Doorbell for how to wait without losing a ring.
    std::uint32_t sequence() const noexcept { return bell_.sequence(); }

    /// See Doorbell::wait().
    bool wait(std::uint32_t seen, Deadline deadline, InterruptCheck check);

    /// Spins until a ring after `seen`, but only if the last ring came from a CPU other than the
    /// caller's: a ringer on the same CPU could not run during the spin. Returns whether there was
    /// a ring.
    bool spin(std::uint32_t seen, Clock::duration longest) const noexcept;

    /// Sets whether rings reach the service thread from now on. After listen(true), check for
    /// changes that earlier rings reported, then sleep.
    void listen(bool wanted) noexcept;

    /// Number of calls to ring_for_control() so far.
    std::uint32_t control_news() const noexcept;

    /// Makes the eventfd unreadable until the next ring.
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
