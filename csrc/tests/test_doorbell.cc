#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/doorbell.h"
#include "core/segment.h"

using namespace megatron_ext;
using megatron_ext::testing::fork_child;
using megatron_ext::testing::join_child;

namespace {

// Waits that must succeed have no time-out. With a time-out, a lost wake-up would go unnoticed,
// because the sequence has changed by then. Without one, the test hangs until ctest reports it.

/// The shared state of two processes, at the start of a fresh (zeroed) segment.
struct Shared {
    std::uint32_t ping;
    std::uint32_t pong;
    std::atomic<std::uint64_t> value;
    std::atomic<std::uint32_t> num_waiting;
};

Shared* shared_in(const Segment& segment) { return static_cast<Shared*>(segment.data()); }

/// Sleeps until `condition` holds, as doorbell.h prescribes.
template <typename Condition>
void wait_until(const Doorbell& bell, Condition condition) {
    std::uint32_t seen = bell.sequence();
    while (!condition()) {
        CHECK(bell.wait(seen));
        seen = bell.sequence();
    }
}

pid_t thread_id() { return static_cast<pid_t>(::syscall(SYS_gettid)); }

/// Returns once the thread sleeps in the kernel, which happens only in a wait. `task` is a folder
/// in /proc.
void wait_until_asleep(const std::string& task) {
    for (;;) {
        std::ifstream file("/proc/" + task + "/stat");
        std::string stat;
        std::getline(file, stat);
        const auto name_end = stat.rfind(')');
        CHECK(name_end != std::string::npos);
        if (stat.at(name_end + 2) == 'S') {
            return;
        }
        std::this_thread::yield();
    }
}

void wait_until_asleep_thread(const std::atomic<pid_t>& tid) {
    while (tid.load() == 0) {
        std::this_thread::yield();
    }
    wait_until_asleep("self/task/" + std::to_string(tid.load()));
}

struct Stop : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void stop_waiting() { throw Stop("stopped by the interrupt check"); }

std::atomic<int> num_signals{0};

void count_signal(int) { num_signals.fetch_add(1); }

}  // namespace

TEST(refuses_words_that_cannot_be_a_futex) {
    alignas(4) char bytes[8] = {};
    CHECK_THROWS(Doorbell(nullptr), std::invalid_argument, "aligned to 4");
    CHECK_THROWS(Doorbell(bytes + 2), std::invalid_argument, "aligned to 4");
}

TEST(a_ring_before_the_wait_is_not_lost) {
    std::uint32_t word = 0;
    Doorbell bell(&word);
    const std::uint32_t seen = bell.sequence();
    bell.ring();
    CHECK(bell.wait(seen, deadline_after(0.0)));
    CHECK_EQ(bell.sequence(), seen + 1);
}

TEST(the_sequence_wraps) {
    std::uint32_t word = UINT32_MAX;
    Doorbell bell(&word);
    bell.ring();
    CHECK_EQ(bell.sequence(), 0U);
    CHECK(bell.wait(UINT32_MAX));
}

TEST(a_time_out_is_never_early) {
    std::uint32_t word = 0;
    const Doorbell bell(&word);
    for (const double seconds : {0.0, 0.001, 0.05, 0.25}) {
        const Deadline deadline = deadline_after(seconds);
        CHECK(!bell.wait(0, deadline));
        CHECK(Clock::now() >= deadline);
    }
}

TEST(the_interrupt_check_ends_a_wait) {
    std::uint32_t word = 0;
    const Doorbell bell(&word);
    CHECK_THROWS(bell.wait(0, kNever, &stop_waiting), Stop, "stopped by");
}

TEST(signals_do_not_end_a_wait) {
    struct sigaction action{};
    action.sa_handler = &count_signal;  // no SA_RESTART: the futex call returns EINTR
    CHECK(::sigaction(SIGUSR1, &action, nullptr) == 0);
    std::uint32_t word = 0;
    Doorbell bell(&word);
    std::atomic<bool> done{false};
    std::atomic<pid_t> tid{0};
    bool rung = false;
    std::thread waiter([&] {
        tid = thread_id();
        rung = bell.wait(0);
        done = true;
    });
    for (int sent = 1; sent <= 20; ++sent) {
        wait_until_asleep_thread(tid);
        CHECK(::pthread_kill(waiter.native_handle(), SIGUSR1) == 0);
        while (num_signals.load() < sent) {
            std::this_thread::yield();
        }
    }
    CHECK(!done.load());
    bell.ring();
    waiter.join();
    CHECK(rung);
}

TEST(one_ring_wakes_all_threads_and_publishes_what_was_written_before) {
    constexpr int kNumWaiters = 8;
    std::uint32_t word = 0;
    Doorbell bell(&word);
    std::vector<std::atomic<pid_t>> tids(kNumWaiters);
    int plain_value = 0;  // not atomic: ring() and wait() must order accesses, which TSan checks
    std::vector<std::thread> waiters;
    for (int i = 0; i < kNumWaiters; ++i) {
        waiters.emplace_back([&, i] {
            tids[static_cast<std::size_t>(i)] = thread_id();
            CHECK(bell.wait(0));
            CHECK_EQ(plain_value, 7);
        });
    }
    for (const auto& tid : tids) {
        wait_until_asleep_thread(tid);
    }
    plain_value = 7;
    bell.ring();
    for (auto& waiter : waiters) {
        waiter.join();
    }
}

TEST(many_ringing_threads_lose_nothing) {
    constexpr int kNumThreads = 4;
    constexpr std::uint64_t kEach = 5000;
    std::uint32_t word = 0;
    Doorbell bell(&word);
    std::atomic<std::uint64_t> produced{0};
    std::vector<std::thread> producers;
    for (int i = 0; i < kNumThreads; ++i) {
        producers.emplace_back([&] {
            for (std::uint64_t n = 0; n < kEach; ++n) {
                produced.fetch_add(1, std::memory_order_relaxed);
                bell.ring();
            }
        });
    }
    wait_until(bell,
               [&] { return produced.load(std::memory_order_relaxed) == kNumThreads * kEach; });
    for (auto& producer : producers) {
        producer.join();
    }
    CHECK_EQ(bell.sequence(), static_cast<std::uint32_t>(kNumThreads * kEach));
}

TEST(two_processes_ring_each_other_thousands_of_times) {
    constexpr std::uint64_t kRounds = 5000;
    const Segment segment = Segment::create(sizeof(Shared));
    Shared* shared = shared_in(segment);
    const pid_t child = fork_child([&] {
        const Doorbell ping(&shared->ping);
        Doorbell pong(&shared->pong);
        for (std::uint64_t round = 1; round <= kRounds; ++round) {
            wait_until(ping, [&] { return shared->value.load() == 2 * round - 1; });
            shared->value.store(2 * round);
            pong.ring();
        }
    });
    Doorbell ping(&shared->ping);
    const Doorbell pong(&shared->pong);
    for (std::uint64_t round = 1; round <= kRounds; ++round) {
        shared->value.store(2 * round - 1);
        ping.ring();
        wait_until(pong, [&] { return shared->value.load() == 2 * round; });
    }
    CHECK_EQ(join_child(child), 0);
}

TEST(one_ring_wakes_all_processes) {
    constexpr std::uint32_t kNumChildren = 4;
    const Segment segment = Segment::create(sizeof(Shared));
    Shared* shared = shared_in(segment);
    Doorbell ping(&shared->ping);
    Doorbell pong(&shared->pong);
    std::vector<pid_t> children;
    for (std::uint32_t i = 0; i < kNumChildren; ++i) {
        children.push_back(fork_child([&] {
            const std::uint32_t seen = ping.sequence();
            shared->num_waiting.fetch_add(1);
            pong.ring();
            CHECK(ping.wait(seen));
        }));
    }
    wait_until(pong, [&] { return shared->num_waiting.load() == kNumChildren; });
    for (const pid_t child : children) {
        wait_until_asleep(std::to_string(child));
    }
    ping.ring();
    for (const pid_t child : children) {
        CHECK_EQ(join_child(child), 0);
    }
}

TEST(a_killed_waiter_or_ringer_leaves_the_doorbell_usable) {
    for (int attempt = 0; attempt < 10; ++attempt) {
        const Segment segment = Segment::create(sizeof(Shared));
        Shared* shared = shared_in(segment);
        Doorbell ping(&shared->ping);
        Doorbell pong(&shared->pong);
        const pid_t waiter = fork_child([&] {
            shared->num_waiting.fetch_add(1);
            pong.ring();
            ping.wait(0);
        });
        const pid_t ringer = fork_child([&] {
            shared->num_waiting.fetch_add(1);
            for (;;) {
                pong.ring();
            }
        });
        wait_until(pong, [&] { return shared->num_waiting.load() == 2; });
        wait_until_asleep(std::to_string(waiter));
        for (const pid_t child : {waiter, ringer}) {
            CHECK(::kill(child, SIGKILL) == 0);
            const int status = join_child(child);
            CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        }
        const std::uint32_t rings = pong.sequence();
        CHECK(!pong.wait(rings, deadline_after(0.01)));
        pong.ring();
        CHECK(pong.wait(rings, deadline_after(0.0)));
        CHECK(!ping.wait(0, deadline_after(0.0)));
    }
}
