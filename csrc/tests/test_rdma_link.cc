// Endpoints of one process, linked over the fake library. If both must wait, each has its own
// thread.

#include "rdma/rdma_link.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fake_rdma.h"
#include "linked_processes.h"
#include "rdma/devices.h"

using namespace megatron_ext;           // NOLINT
using namespace megatron_ext::testing;  // NOLINT

namespace {

constexpr ArenaSize kSize{4, 4096};

struct Linked {
    /// Unless `right_works`, no thread receives the messages of the right end.
    explicit Linked(bool right_works = true) : left(0, kSize, true), right(1, kSize, true) {
        use_fake_verbs();
        auto [left_socket, right_socket] = connected_sockets(Wire::kTcp);
        left_fd = left_socket.get();
        std::thread other([this, &socket = right_socket] {
            right_link = join(right, 0, std::move(socket));
        });
        left.add(1, join(left, 1, std::move(left_socket)));
        other.join();
        if (right_works) {
            right.add(0, right_link);
        }
    }

    std::shared_ptr<Link> join(const Endpoint& endpoint, int peer, UniqueFd socket) const {
        auto sources = choose_sources(list_devices(sysfs.path()), {}, "", 0, sysfs.path());
        const auto made = std::make_shared<RdmaLink>(endpoint.context(peer), std::move(socket),
                                                     std::move(sources), RdmaSettings{}, 5.0);
        made->connect(kForEver, nullptr);
        return made;
    }

    FakeSysfs sysfs;
    Endpoint left;
    Endpoint right;
    std::shared_ptr<Link> right_link;
    int left_fd = -1;
};

}  // namespace

TEST(messages_are_taken_in_any_order) {
    Linked both;
    constexpr std::uint64_t kMessages = 60;
    const auto talk = [](Endpoint& endpoint, int peer) {
        for (std::uint64_t tag = 0; tag < kMessages; ++tag) {
            send(endpoint, peer, tag, static_cast<std::size_t>(tag * 331));
        }
        for (std::uint64_t tag = kMessages; tag-- > 0;) {
            check_content(endpoint.take(peer, tag, kForEver, nullptr));
        }
        CHECK(endpoint.flush(kForEver, nullptr));
    };
    std::thread other(talk, std::ref(both.right), 0);
    talk(both.left, 1);
    other.join();
    CHECK(std::string(report(both.left).wire) == "rdma");
    CHECK_EQ(report(both.left).counts.num_queued, std::size_t{0});
}

TEST(a_device_writes_into_the_memory_that_is_sent) {
    Linked both;
    const auto publish = [&](std::uint64_t tag) {
        MessageInfo info;
        info.tag = tag;
        info.num_bytes = 4096 - tag;
        std::optional<Message> message;
        while (!(message = both.left.reserve(1, info))) {  // until a credit has arrived
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        CHECK(!both.left.reserve(1, info));  // one of four: the receiver may keep two
        const auto bytes = content(tag, static_cast<std::size_t>(info.num_bytes));
        std::memcpy(message->bytes.get(), bytes->data(), bytes->size());
        both.left.publish(1, *message);
    };
    for (std::uint64_t tag = 0; tag < 30; ++tag) {
        publish(tag);
        check_content(both.right.take(0, tag, kForEver, nullptr));
    }
    CHECK(both.left.flush(kForEver, nullptr));
    const Faults faults("wc=12");
    publish(30);
    CHECK(!both.left.flush(kForEver, nullptr));
    CHECK(report(both.left).state == PeerState::kDied);
}

TEST(ten_thousand_random_messages_arrive_undamaged) {
    Linked both;
    constexpr std::uint64_t kEachSide = 5000;
    constexpr std::uint64_t kAhead = 50;  // order is random among this many
    const auto size_of = [](std::uint64_t tag) {
        std::minstd_rand random(static_cast<unsigned>(tag + 1));
        random.discard(3);
        return random() % 11 == 0 ? 0U : random() % (random() % 20 == 0 ? 20000U : 300U);
    };
    const auto talk = [&](Endpoint& endpoint, int peer) {
        std::mt19937 random(static_cast<unsigned>(peer));
        for (std::uint64_t first = 0; first < kEachSide; first += kAhead) {
            std::vector<std::uint64_t> tags(kAhead);
            std::iota(tags.begin(), tags.end(), first);
            std::shuffle(tags.begin(), tags.end(), random);
            for (const std::uint64_t tag : tags) {
                send(endpoint, peer, tag, size_of(tag));
            }
            std::shuffle(tags.begin(), tags.end(), random);
            for (const std::uint64_t tag : tags) {
                const std::optional<Message> message = endpoint.take(peer, tag, kForEver, nullptr);
                CHECK(message && message->info.num_bytes == size_of(tag));
                check_content(message);
            }
        }
        CHECK(endpoint.flush(kForEver, nullptr));
    };
    std::thread other(talk, std::ref(both.right), 0);
    talk(both.left, 1);
    other.join();
}

TEST(a_receiver_that_computes_gives_room_all_the_same) {
    Linked both;
    for (std::uint64_t tag = 0; tag < 20; ++tag) {
        send(both.left, 1, tag, 5000);
    }
    CHECK(both.left.flush(kForEver, nullptr));  // the service thread does the work
    check_content(both.right.take(0, 19, kForEver, nullptr));
}

TEST(a_message_that_is_let_go_gives_its_slot_back) {
    Linked both;
    for (std::uint64_t tag = 0; tag < 2; ++tag) {
        send(both.left, 1, tag, 100);
        check_content(both.right.take(0, tag, kForEver, nullptr));
    }
    std::vector<std::optional<Message>> kept;
    for (std::uint64_t tag = 2; tag < 40; ++tag) {
        send(both.left, 1, tag, 100);
        kept.push_back(both.right.take(0, tag, kForEver, nullptr));
        check_content(kept.back());
        if (kept.size() > 3) {
            kept.erase(kept.begin());
        }
    }
    CHECK(both.left.flush(kForEver, nullptr));
}

TEST(what_was_sent_before_a_farewell_is_received) {
    Linked both;
    for (std::uint64_t tag = 0; tag < 10; ++tag) {
        send(both.left, 1, tag, 9000);
    }
    both.left.close();
    for (std::uint64_t tag = 0; tag < 10; ++tag) {
        check_content(both.right.take(0, tag, kForEver, nullptr));
    }
    CHECK(!both.right.take(0, 10, kForEver, nullptr));
    CHECK(report(both.right).state == PeerState::kClosed);
}

TEST(a_peer_that_gives_up_is_heard) {
    Linked both;
    both.left.abort("rank 0: out of memory");
    CHECK(!both.right.take(0, 1, kForEver, nullptr));
    CHECK(report(both.right).state == PeerState::kAborted);
    CHECK(report(both.right).reason == "rank 0: out of memory");
}

TEST(the_end_of_the_connection_is_the_death_of_the_peer) {
    Linked both;
    CHECK(::shutdown(both.left_fd, SHUT_RDWR) == 0);
    CHECK(!both.right.take(0, 1, kForEver, nullptr));
    CHECK(report(both.right).state == PeerState::kDied);
}

TEST(a_write_that_fails_is_the_death_of_the_peer_with_its_reason) {
    Linked both;
    const Faults faults("wc=12");
    send(both.left, 1, 1, 100);
    CHECK(!both.left.flush(kForEver, nullptr));
    const PeerReport told = report(both.left);
    CHECK(told.state == PeerState::kDied);
    CHECK(told.reason.find("an RDMA write to rank 1 failed: transport retry counter exceeded "
                           "(status 12") == 0);
}

TEST(a_sender_that_only_waits_for_room_looks_for_its_peer) {
    Linked both(/*right_works=*/false);
    for (std::uint64_t tag = 0; tag < 8; ++tag) {
        send(both.left, 1, tag, 4000);
    }
    while (report(both.left).counts.num_queued > 4) {  // until the four slots are full
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const Faults faults("wc=12");
    CHECK(!both.left.flush(kForEver, nullptr));  // nothing has been sent since, except a probe
    CHECK(report(both.left).state == PeerState::kDied);
}

TEST(what_arrived_before_a_failure_is_received) {
    const auto lose = [](const auto& fail) {
        Linked both(/*right_works=*/false);
        for (std::uint64_t tag = 0; tag < 3; ++tag) {
            send(both.left, 1, tag, 100);
        }
        CHECK(both.left.flush(kForEver, nullptr));  // all have arrived, but none has been received
        [[maybe_unused]] const auto failure = fail();
        both.right.add(0, both.right_link);
        for (std::uint64_t tag = 0; tag < 3; ++tag) {
            check_content(both.right.take(0, tag, kForEver, nullptr));
        }
        CHECK(!both.right.take(0, 3, kForEver, nullptr));
        CHECK(report(both.right).state == PeerState::kDied);
    };
    lose([] {
        send_async_event(verbs::kEventQpFatal);
        return 0;
    });
    lose([] { return Faults("post_receive=12"); });
}

TEST(nothing_is_left_open) { CHECK_EQ(num_fake_objects(), 0); }
