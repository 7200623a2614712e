#include "core/process_bell.h"

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "check.h"

using namespace megatron_ext;

namespace {

constexpr std::chrono::seconds kLong{1};

/// Pins the calling thread to a CPU; returns false if that is not allowed.
bool stay_on(int cpu) {
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    CPU_SET(cpu, &cpus);
    return ::sched_setaffinity(0, sizeof(cpus), &cpus) == 0;
}

/// Rings from a CPU, on a separate thread.
void ring_on(ProcessBell& bell, int cpu) {
    std::thread([&] {
        stay_on(cpu);
        bell.ring();
    }).join();
}

TEST(nobody_spins_for_a_ring_that_cannot_come_meanwhile) {
    ProcessBell bell = ProcessBell::create();
    const Deadline begin = Clock::now();
    CHECK(!bell.spin(bell.sequence(), kLong));  // there has been no ring so far
    if (stay_on(0)) {
        ring_on(bell, 0);
        CHECK(!bell.spin(bell.sequence(), kLong));  // the ringer needs this CPU
    }
    ring_on(bell, 1);
    CHECK(!bell.spin(bell.sequence(), Clock::duration::zero()));
    CHECK(Clock::now() - begin < kLong);
}

TEST(a_spin_ends_with_a_ring_from_another_cpu_or_in_time) {
    if (std::thread::hardware_concurrency() < 2 || !stay_on(0)) {
        return;
    }
    ProcessBell bell = ProcessBell::create();
    ring_on(bell, 1);
    const std::uint32_t seen = bell.sequence();
    const Deadline begin = Clock::now();
    CHECK(!bell.spin(seen, std::chrono::milliseconds(1)));
    CHECK(Clock::now() - begin >= std::chrono::milliseconds(1));
    std::thread ringer([&] {
        stay_on(1);
        bell.ring();
    });
    // A busy machine may stop the ringer for longer than any spin.
    while (!bell.spin(seen, kLong)) {
    }
    CHECK_EQ(bell.sequence(), seen + 1);
    ringer.join();
    CHECK(bell.spin(seen, kLong));  // a ring before the spin
    CHECK(bell.spin(seen, Clock::duration::zero()));
}

TEST(a_ring_at_any_moment_of_a_spin_and_the_sleep_after_it_is_seen) {
    constexpr std::uint32_t kNumRounds = 3000;
    ProcessBell ping = ProcessBell::create();
    ProcessBell pong = ProcessBell::create();
    std::atomic<std::uint32_t> value{0};
    const auto await = [&](ProcessBell& bell, std::uint32_t wanted) {
        for (;;) {
            const std::uint32_t seen = bell.sequence();
            if (value.load() == wanted) {
                return;
            }
            // Short spins often end just before the ring.
            if (!bell.spin(seen, std::chrono::microseconds(wanted % 7))) {
                CHECK(bell.wait(seen, Clock::now() + 20 * kLong, nullptr));
            }
        }
    };
    std::thread other([&] {
        for (std::uint32_t round = 0; round < kNumRounds; ++round) {
            await(ping, 2 * round + 1);
            value.store(2 * round + 2);
            pong.ring();
        }
    });
    for (std::uint32_t round = 0; round < kNumRounds; ++round) {
        value.store(2 * round + 1);
        ping.ring();
        await(pong, 2 * round + 2);
    }
    other.join();
}

}  // namespace
