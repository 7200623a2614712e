#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "core/process_bell.h"
#include "core/unique_fd.h"
#include "core/wait.h"

namespace megatron_ext {

/// A thread that sleeps in epoll until an event on a descriptor, a write to the bell's eventfd, or
/// a deadline, then works and sleeps again. The thread blocks all signals.
///
/// Concurrency: one thread calls the members; a forked child must call abandon().
class Service {
  public:
    /// The ids of the descriptors that have events; `woken` is true after wake_service() of the
    /// bell.
    struct News {
        bool woken;
        std::vector<int> ids;
    };
    /// Returns the deadline of its next call. Must not throw.
    using Work = std::function<Deadline(const News&)>;

    /// Throws TransportError if the process has no descriptor left for epoll.
    explicit Service(std::shared_ptr<ProcessBell> bell);
    Service(const Service&) = delete;
    Service& operator=(const Service&) = delete;
    ~Service();

    /// Adds a descriptor, edge-triggered; events may be pending. May be called while the thread
    /// runs.
    void watch(int fd, int id);

    bool running() const noexcept { return thread_.joinable(); }

    /// Starts the thread.
    void start(Work work);

    /// Ends the thread and waits for it.
    void stop() noexcept;

    /// Forgets the thread, which does not exist in a forked child.
    void abandon() noexcept;

  private:
    void run();

    std::shared_ptr<ProcessBell> bell_;
    UniqueFd epoll_;
    std::atomic<bool> stopping_{false};
    Work work_;
    std::thread thread_;
};

}  // namespace megatron_ext
