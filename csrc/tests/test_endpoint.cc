#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.h"
#include "core/endpoint.h"
#include "core/errors.h"
#include "shm/shm_link.h"

using namespace megatron_ext;
using megatron_ext::testing::fork_child;
using megatron_ext::testing::join_child;

namespace {

// Waits that have to succeed; ctest ends a test that hangs.
constexpr Deadline kForEver = kNever;

struct Stop : std::runtime_error {
    using std::runtime_error::runtime_error;
};

void stop_waiting() { throw Stop("stopped by the interrupt check"); }

std::shared_ptr<std::vector<unsigned char>> content(std::uint64_t tag, std::size_t num_bytes) {
    auto bytes = std::make_shared<std::vector<unsigned char>>(num_bytes);
    std::mt19937_64 random(tag);
    for (unsigned char& byte : *bytes) {
        byte = static_cast<unsigned char>(random());
    }
    return bytes;
}

void send(Endpoint& endpoint, int peer, std::uint64_t tag, std::size_t num_bytes) {
    MessageInfo info;
    info.tag = tag;
    info.num_bytes = num_bytes;
    const auto bytes = content(tag, num_bytes);
    endpoint.send(peer, info, bytes->data(), bytes);
}

void check_content(const std::optional<Message>& message) {
    CHECK(message.has_value());
    const auto num_bytes = static_cast<std::size_t>(message->info.num_bytes);
    const auto expected = content(message->info.tag, num_bytes);
    CHECK(num_bytes == 0 || std::memcmp(message->bytes.get(), expected->data(), num_bytes) == 0);
}

/// Runs `other` as rank 1 in a child and `own` as rank 0 here, linked; returns how the child ended.
int run_pair(ArenaSize size, const std::function<void(Endpoint&)>& own,
             const std::function<void(Endpoint&)>& other) {
    int fds[2];
    CHECK(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0);
    UniqueFd left(fds[0]);
    UniqueFd right(fds[1]);
    const auto run = [&](int rank, UniqueFd socket, const std::function<void(Endpoint&)>& body) {
        Endpoint endpoint(rank, size, true);
        const auto link = std::make_shared<ShmLink>(endpoint.context(1 - rank), std::move(socket));
        link->accept(kForEver, nullptr);
        endpoint.add(1 - rank, link);
        body(endpoint);
    };
    const pid_t child = fork_child([&] {
        left.reset();
        run(1, std::move(right), other);
    });
    right.reset();
    run(0, std::move(left), own);
    return join_child(child);
}

PeerReport report(Endpoint& endpoint) { return endpoint.peers().at(0); }

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
        CHECK_EQ(run_pair(size, body(0), body(1)), 0);
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
    CHECK_EQ(run_pair({4, 64}, own, other), 0);
}

TEST(what_was_sent_before_a_farewell_is_still_there) {
    const auto own = [](Endpoint& endpoint) {
        CHECK(!endpoint.take(1, 9, kForEver, nullptr));
        CHECK(report(endpoint).state == PeerState::kClosed);
        check_content(endpoint.take(1, 3, kForEver, nullptr));
        CHECK(endpoint.arrivals(kForEver, nullptr).empty());
        CHECK_THROWS(send(endpoint, 1, 1, 1), TransportError, "rank 1 is not open");
    };
    const auto other = [](Endpoint& endpoint) { send(endpoint, 0, 3, 10); };
    CHECK_EQ(run_pair({4, 64}, own, other), 0);
}

TEST(a_killed_peer_ends_every_wait) {
    int fds[2];
    CHECK(::pipe(fds) == 0);
    const auto own = [&](Endpoint& endpoint) {
        check_content(endpoint.take(1, 3, kForEver, nullptr));
        for (std::uint64_t tag = 0; tag < 8; ++tag) {
            send(endpoint, 1, tag, 64);  // more than fits
        }
        CHECK(::write(fds[1], "k", 1) == 1);
        CHECK(!endpoint.flush(kForEver, nullptr));
        CHECK(report(endpoint).state == PeerState::kDied);
        CHECK(report(endpoint).counts.num_queued > 0);
        CHECK(!endpoint.take(1, 4, kForEver, nullptr));
        CHECK(endpoint.arrivals(kForEver, nullptr).empty());
    };
    const auto other = [&](Endpoint& endpoint) {
        send(endpoint, 0, 3, 10);
        char byte = 0;
        CHECK(::read(fds[0], &byte, 1) == 1);
        ::raise(SIGKILL);
    };
    const int status = run_pair({4, 64}, own, other);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    ::close(fds[0]);
    ::close(fds[1]);
}

TEST(whoever_gives_up_says_why) {
    const auto own = [](Endpoint& endpoint) {
        CHECK(!endpoint.take(1, 4, kForEver, nullptr));
        CHECK(report(endpoint).state == PeerState::kAborted);
        CHECK(report(endpoint).reason == "no more memory");
    };
    const auto other = [](Endpoint& endpoint) { endpoint.abort("no more memory"); };
    CHECK_EQ(run_pair({4, 64}, own, other), 0);
}

TEST(waits_end_in_time_and_by_interruption) {
    const auto own = [](Endpoint& endpoint) {
        const Deadline deadline = deadline_after(0.15);
        CHECK(!endpoint.take(1, 4, deadline, nullptr));
        CHECK(Clock::now() >= deadline);
        CHECK(report(endpoint).state == PeerState::kOpen);
        for (int i = 0; i < 3; ++i) {
            send(endpoint, 1, 5, 64);
        }
        CHECK(!endpoint.flush(deadline_after(0.01), nullptr));
        CHECK_EQ(report(endpoint).counts.num_queued, 1U);
        CHECK_THROWS(endpoint.take(1, 4, kForEver, &stop_waiting), Stop, "stopped");
        CHECK_THROWS(endpoint.flush(kForEver, &stop_waiting), Stop, "stopped");
        CHECK_THROWS(endpoint.arrivals(kForEver, &stop_waiting), Stop, "stopped");
    };
    int fds[2];
    CHECK(::pipe(fds) == 0);
    const auto other = [&](Endpoint&) {
        ::close(fds[1]);
        char byte = 0;
        CHECK(::read(fds[0], &byte, 1) == 0);  // says nothing until the other end closes
    };
    const auto own_then_close = [&](Endpoint& endpoint) {
        own(endpoint);
        ::close(fds[1]);
    };
    CHECK_EQ(run_pair({2, 64}, own_then_close, other), 0);
    ::close(fds[0]);
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
}

TEST(a_forked_child_is_refused_and_says_no_farewell) {
    const auto own = [](Endpoint& endpoint) {
        const pid_t child = fork_child([&] {
            CHECK_THROWS(send(endpoint, 1, 1, 1), TransportError, "forked child");
            endpoint.~Endpoint();
        });
        CHECK_EQ(join_child(child), 0);
        send(endpoint, 1, 1, 50);
    };
    const auto other = [](Endpoint& endpoint) {
        check_content(endpoint.take(0, 1, kForEver, nullptr));
    };
    CHECK_EQ(run_pair({2, 64}, own, other), 0);
}
