#include "core/service.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "core/errors.h"

namespace megatron_ext {
namespace {

constexpr int kBell = -1;  // ranks are not negative

/// Milliseconds until `deadline` for epoll_wait, rounded up so that it never wakes too early.
int milliseconds_until(Deadline deadline) {
    if (deadline == kNever) {
        return -1;
    }
    const auto remaining = deadline - Clock::now();
    if (remaining <= Clock::duration::zero()) {
        return 0;
    }
    const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(remaining).count();
    return static_cast<int>(std::min<long long>(milliseconds, INT_MAX));
}

}  // namespace

Service::Service(std::shared_ptr<ProcessBell> bell)
    : bell_(std::move(bell)), epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    if (!epoll_) {
        const int error_number = errno;
        throw_errno("cannot create an epoll descriptor", error_number);
    }
    watch(bell_->event_fd(), kBell);
}

Service::~Service() { stop(); }

void Service::watch(int fd, int id) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    if (id == kBell) {
        event.events = EPOLLIN | EPOLLET;  // not EPOLLOUT: an eventfd is always writable
    }
    event.data.u64 = static_cast<std::uint64_t>(id);
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
        const int error_number = errno;
        throw_errno("cannot wait on descriptor " + std::to_string(fd), error_number);
    }
}

void Service::start(Work work) {
    work_ = std::move(work);
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);  // a thread inherits its creator's mask
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
        ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw TransportError(std::string("cannot start a thread for messages: ") + error.what());
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Service::run() {
    std::array<epoll_event, 64> events{};
    News news{true, {}};
    while (!stopping_.load()) {
        const Deadline next = work_(news);
        const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                       milliseconds_until(next));
        news = {false, {}};
        for (int i = 0; i < count; ++i) {
            const int id = static_cast<int>(events[static_cast<std::size_t>(i)].data.u64);
            if (id == kBell) {
                bell_->clear_event();
                news.woken = true;
            } else {
                news.ids.push_back(id);
            }
        }
    }
}

void Service::stop() noexcept {
    if (thread_.joinable()) {
        stopping_.store(true);
        bell_->wake_service();
        thread_.join();
        stopping_.store(false);
    }
}

void Service::abandon() noexcept {
    if (thread_.joinable()) {
        // Leak the handle: joining or detaching a thread that does not exist in this process is
        // undefined behaviour.
        new std::thread(std::move(thread_));
    }
}

}  // namespace megatron_ext
