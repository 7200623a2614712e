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

/// A thread that sleeps in epoll until descriptors have news, the bell's eventfd is written, or a
/// time has come; then it works, and sleeps again. It takes no signals.
///
/// Concurrency: members are called by one thread; a forked child has to abandon() it.
class Service {
  public:
    /// Ids of the descriptors with news; after wake_service() of the bell, `woken`.
    struct News {
        bool woken;
        std::vector<int> ids;
    };
    /// Returns when it wants to be called again at the latest. Must not throw.
    using Work = std::function<Deadline(const News&)>;

    /// Throws TransportError if there is no descriptor left for epoll.
    explicit Service(std::shared_ptr<ProcessBell> bell);
    Service(const Service&) = delete;
    Service& operator=(const Service&) = delete;
    ~Service();

    /// Adds a descriptor, edge-triggered; it may have news already. Also while the thread runs.
    void watch(int fd, int id);

    bool running() const noexcept { return thread_.joinable(); }

    /// Starts the thread.
    void start(Work work);

    /// Ends the thread and waits for it.
    void stop() noexcept;

    /// Forgets the thread, which a forked child does not have.
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
