#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/endpoint.h"
#include "core/errors.h"
#include "linked_processes.h"

using namespace megatron_ext;
using namespace megatron_ext::testing;

namespace {

/// Runs a test on every wire: `own` is rank 0, `other` is rank 1, and both must succeed.
template <typename Own, typename Other>
void check_wires(ArenaSize size, const Own& own, const Other& other) {
    for (const Wire wire : kWires) {
        CHECK_EQ(run_both(wire, size, own, other), 0);
    }
}

}  // namespace

TEST(both_send_everything_first_and_take_it_in_an_order_of_their_own) {
    constexpr std::uint64_t kNumMessages = 400;
    const auto body = [](int rank) {
        return [rank](Endpoint& endpoint) {
            std::vector<std::uint64_t> tags(kNumMessages);
            std::mt19937_64 random(static_cast<unsigned>(rank));
            for (std::uint64_t tag = 0; tag < kNumMessages; ++tag) {
                tags[tag] = tag;
                send(endpoint, 1 - rank, tag, tag % 10 == 0 ? 0 : random() % 20000);
            }
            std::shuffle(tags.begin(), tags.end(), random);
            for (const std::uint64_t tag : tags) {
                check_content(endpoint.take(1 - rank, tag, kForEver, nullptr));
            }
            CHECK(endpoint.flush(kForEver, nullptr));
            CHECK_EQ(report(endpoint).num_arrived, 0U);
            CHECK_EQ(report(endpoint).counts.num_held, 0UL);
        };
    };
    for (const ArenaSize size : {ArenaSize{1, 4096}, ArenaSize{8, 4096}, ArenaSize{64, 32768}}) {
        check_wires(size, body(0), body(1));
    }
}

TEST(arrivals_are_named_whatever_came_first) {
    const auto own = [](Endpoint& endpoint) {
        std::vector<Arrival> all;
        while (all.size() < 3) {
            const auto some = endpoint.arrivals(kForEver, nullptr);
            CHECK(!some.empty());
            all.insert(all.end(), some.begin(), some.end());
        }
        CHECK((all == std::vector<Arrival>{{1, 30}, {1, 10}, {1, 20}}));
        CHECK(endpoint.arrivals(deadline_after(0.0), nullptr).empty());
        check_content(endpoint.take(1, 10, kForEver, nullptr));
        send(endpoint, 1, 1, 0);
    };
    const auto other = [](Endpoint& endpoint) {
        for (const std::uint64_t tag : {30U, 10U, 20U}) {
            send(endpoint, 0, tag, 100);
        }
        CHECK(endpoint.take(0, 1, kForEver, nullptr));
    };
    check_wires({4, 64}, own, other);
}

TEST(a_wait_is_interrupted_though_rings_come_all_the_time) {
    Endpoint endpoint(0, {2, 64}, false);
    std::atomic<bool> done{false};
    std::thread ringer([&] {
        while (!done.load()) {
            send(endpoint, 0, 1, 0);  // not the awaited message
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    });
    CHECK_THROWS(endpoint.take(0, 2, kForEver, &stop_waiting), Stop, "stopped");
    done.store(true);
    ringer.join();
}

TEST(what_finds_no_room_goes_on_while_both_sides_compute) {
    // Neither process calls its endpoint while the other one needs it: the sender's service thread
    // must push the pieces for which there was no room during the sender's first call.
    const Signal sent;
    const Signal taken;
    constexpr std::size_t kBytes = 1U << 21;
    const auto own = [&](Endpoint& endpoint) {
        for (std::uint64_t tag = 0; tag < 4; ++tag) {
            send(endpoint, 1, tag, kBytes);
        }
        CHECK(report(endpoint).counts.num_queued > 0);
        sent.give();
        taken.await();
        CHECK_EQ(report(endpoint).counts.num_queued, 0U);
    };
    const auto other = [&](Endpoint& endpoint) {
        sent.await();
        for (const std::uint64_t tag : {2U, 0U, 3U, 1U}) {
            check_content(endpoint.take(0, tag, kForEver, nullptr));
        }
        taken.give();
    };
    check_wires({2, 4096}, own, other);
}

TEST(what_was_sent_before_a_farewell_is_still_there) {
    const auto own = [](Endpoint& endpoint) {
        send(endpoint, 1, 1, 100);  // never taken, and must not destroy the reply
        CHECK(!endpoint.take(1, 9, kForEver, nullptr));
        CHECK(report(endpoint).state == PeerState::kClosed);
        check_content(endpoint.take(1, 3, kForEver, nullptr));
        CHECK(endpoint.arrivals(kForEver, nullptr).empty());
        CHECK_THROWS(send(endpoint, 1, 1, 1), TransportError, "rank 1 is not open");
    };
    const auto other = [](Endpoint& endpoint) { send(endpoint, 0, 3, 1000000); };
    check_wires({256, 8192}, own, other);
}

TEST(a_killed_peer_ends_every_wait) {
    const Signal kill;
    const auto own = [&](Endpoint& endpoint) {
        check_content(endpoint.take(1, 3, kForEver, nullptr));
        for (std::uint64_t tag = 0; tag < 8; ++tag) {
            send_zeros(endpoint, 1, tag, std::size_t{2} << 20);  // more than there is room for
        }
        kill.give();
        CHECK(!endpoint.flush(kForEver, nullptr));
        CHECK(report(endpoint).state == PeerState::kDied);
        CHECK(report(endpoint).counts.num_queued > 0);
        CHECK(!endpoint.take(1, 4, kForEver, nullptr));
        CHECK(endpoint.arrivals(kForEver, nullptr).empty());
    };
    const auto other = [&](Endpoint& endpoint) {
        send(endpoint, 0, 3, 10);
        kill.await();
        ::raise(SIGKILL);
    };
    for (const Wire wire : kWires) {
        const int status = run_both(wire, {4, 64}, own, other, false);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    }
}

TEST(whoever_gives_up_says_why) {
    const auto own = [](Endpoint& endpoint) {
        CHECK(!endpoint.take(1, 99, kForEver, nullptr));
        CHECK(report(endpoint).state == PeerState::kAborted);
        CHECK(report(endpoint).reason == "no more memory");
    };
    const auto other = [](Endpoint& endpoint) {
        for (std::uint64_t tag = 0; tag < 8; ++tag) {
            send_zeros(endpoint, 0, tag, std::size_t{2} << 20);  // the reason must overtake these
        }
        endpoint.abort("no more memory");
    };
    for (const Wire wire : kWires) {
        CHECK_EQ(run_both(wire, {4, 64}, own, other, false), 0);
    }
}

TEST(waits_end_in_time_and_by_interruption) {
    const Signal end;
    const auto own = [&](Endpoint& endpoint) {
        const Deadline deadline = deadline_after(0.15);
        CHECK(!endpoint.take(1, 4, deadline, nullptr));
        CHECK(Clock::now() >= deadline);
        CHECK(report(endpoint).state == PeerState::kOpen);
        CHECK_THROWS(endpoint.take(1, 4, kForEver, &stop_waiting), Stop, "stopped");
        CHECK_THROWS(endpoint.arrivals(kForEver, &stop_waiting), Stop, "stopped");
        end.give();
    };
    const auto other = [&](Endpoint&) { end.await(); };
    check_wires({2, 64}, own, other);
}

TEST(a_flush_without_room_ends_in_time_and_by_interruption) {
    const Signal end;
    const auto own = [&](Endpoint& endpoint) {
        for (int i = 0; i < 3; ++i) {
            send(endpoint, 1, 5, 64);
        }
        CHECK(!endpoint.flush(deadline_after(0.01), nullptr));
        CHECK_EQ(report(endpoint).counts.num_queued, 1U);
        CHECK_THROWS(endpoint.flush(kForEver, &stop_waiting), Stop, "stopped");
        end.give();
    };
    const auto other = [&](Endpoint&) { end.await(); };
    CHECK_EQ(run_both(Wire::kShm, {2, 64}, own, other), 0);
}

TEST(one_process_uses_different_wires_at_once) {
    auto [shm_left, shm_right] = connected_sockets(Wire::kShm);
    auto [tcp_left, tcp_right] = connected_sockets(Wire::kTcp);
    const auto echo = [](int rank, Wire wire, UniqueFd socket) {
        Endpoint endpoint(rank, {4, 4096}, true);
        link(endpoint, 0, wire, std::move(socket));
        for (std::uint64_t tag = 0; tag < 50; ++tag) {
            check_content(endpoint.take(0, tag, kForEver, nullptr));
            send(endpoint, 0, tag, tag * 1000);
        }
        CHECK(endpoint.flush(kForEver, nullptr));
    };
    const pid_t first =
        fork_child([&, &socket = shm_right] { echo(1, Wire::kShm, std::move(socket)); });
    const pid_t second =
        fork_child([&, &socket = tcp_right] { echo(2, Wire::kTcp, std::move(socket)); });
    Endpoint endpoint(0, {4, 4096}, true);
    link(endpoint, 1, Wire::kShm, std::move(shm_left));
    link(endpoint, 2, Wire::kTcp, std::move(tcp_left));
    for (std::uint64_t tag = 0; tag < 50; ++tag) {
        send(endpoint, 1, tag, 5000);
        send(endpoint, 2, tag, 5000);
    }
    std::size_t num_arrived = 0;
    while (num_arrived < 100) {
        for (const Arrival& arrival : endpoint.arrivals(kForEver, nullptr)) {
            check_content(endpoint.take(arrival.source, arrival.tag, kForEver, nullptr));
            ++num_arrived;
        }
    }
    CHECK_EQ(join_child(first), 0);
    CHECK_EQ(join_child(second), 0);
    CHECK(endpoint.peers().at(0).wire == "shm" && endpoint.peers().at(1).wire == "tcp");
}

TEST(a_process_sends_to_itself) {
    Endpoint endpoint(3, {2, 64}, false);
    for (std::uint64_t tag = 0; tag < 10; ++tag) {
        send(endpoint, 3, tag, tag * 100);
    }
    for (std::uint64_t tag = 10; tag-- > 0;) {
        check_content(endpoint.take(3, tag, kForEver, nullptr));
    }
    CHECK(!endpoint.take(3, 1, deadline_after(0.0), nullptr));
    CHECK_THROWS(send(endpoint, 1, 1, 1), std::invalid_argument, "no link to rank 1");
    CHECK_THROWS(endpoint.take(1, 1, kForEver, nullptr), std::invalid_argument, "no link");
    CHECK_THROWS(endpoint.context(3), std::invalid_argument, "already has a link to rank 3");
}

TEST(one_thread_sends_while_another_waits) {
    constexpr std::uint64_t kNumMessages = 200;
    const auto body = [](int rank) {
        return [rank](Endpoint& endpoint) {
            std::thread sender([&] {
                for (std::uint64_t tag = 0; tag < kNumMessages; ++tag) {
                    send(endpoint, 1 - rank, tag, tag % 7 * 3000);
                    send(endpoint, rank, tag, 10);  // wakes the other thread too
                }
            });
            for (std::uint64_t tag = 0; tag < kNumMessages; ++tag) {
                check_content(endpoint.take(1 - rank, tag, kForEver, nullptr));
                check_content(endpoint.take(rank, tag, kForEver, nullptr));
            }
            sender.join();
            CHECK(endpoint.flush(kForEver, nullptr));
        };
    };
    check_wires({4, 4096}, body(0), body(1));
}

TEST(what_was_done_is_counted) {
    const auto own = [](Endpoint& endpoint) {
        endpoint.set_spin(std::chrono::microseconds(20));
        for (std::uint64_t tag = 0; tag < 300; ++tag) {  // waits spin, sleep, or return at once
            send(endpoint, 1, tag, 10);
            check_content(endpoint.take(1, tag, kForEver, nullptr));
        }
        CHECK_EQ(endpoint.counts().num_messages, 300U);
        CHECK_EQ(endpoint.counts().num_bytes, 3000U);
        const double before_s = endpoint.counts().waited_s;
        CHECK(!endpoint.take(1, 1000, deadline_after(0.05), nullptr));
        CHECK(endpoint.counts().last_wait_s >= 0.05);
        CHECK(endpoint.counts().waited_s >= before_s + 0.05);
        send(endpoint, 1, 300, 10);
    };
    const auto other = [](Endpoint& endpoint) {
        for (std::uint64_t tag = 0; tag < 300; ++tag) {
            check_content(endpoint.take(0, tag, kForEver, nullptr));
            send(endpoint, 0, tag, 10);
        }
        check_content(endpoint.take(0, 300, kForEver, nullptr));
    };
    for (const Wire wire : kWires) {
        CHECK_EQ(run_both(wire, {4, 4096}, own, other), 0);
    }
}

TEST(a_forked_child_is_refused_and_says_no_farewell) {
    const auto own = [](Endpoint& endpoint) {
        send(endpoint, 1, 1, 50000);  // there is no room for this, so a service thread runs
        const auto message = endpoint.take(1, 7, kForEver, nullptr);
        const pid_t child = fork_child([&endpoint, copy = message]() mutable {
            CHECK_THROWS(send(endpoint, 1, 1, 1), TransportError, "forked child");
            copy.reset();
            endpoint.~Endpoint();
        });
        CHECK_EQ(join_child(child), 0);
        CHECK_EQ(report(endpoint).counts.num_held, 1UL);
        send(endpoint, 1, 2, 50);
        CHECK(endpoint.flush(kForEver, nullptr));
    };
    const auto other = [](Endpoint& endpoint) {
        send(endpoint, 0, 7, 10);
        check_content(endpoint.take(0, 1, kForEver, nullptr));
        check_content(endpoint.take(0, 2, kForEver, nullptr));
    };
    check_wires({2, 64}, own, other);
}
