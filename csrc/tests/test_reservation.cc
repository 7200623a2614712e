// Slots that are lent before their message exists, for example to a device that writes it.

#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/endpoint.h"
#include "core/errors.h"
#include "linked_processes.h"

using namespace megatron_ext;           // NOLINT
using namespace megatron_ext::testing;  // NOLINT

namespace {

std::optional<Message> reserve(Endpoint& endpoint, std::uint64_t tag, std::size_t num_bytes) {
    MessageInfo info;
    info.tag = tag;
    info.num_bytes = num_bytes;
    return endpoint.reserve(1, info);
}

/// Writes the bytes that the receiver expects.
void fill(const Message& message) {
    const auto num_bytes = static_cast<std::size_t>(message.info.num_bytes);
    std::memcpy(message.bytes.get(), content(message.info.tag, num_bytes)->data(), num_bytes);
}

/// Runs a test over shared memory: `own` is rank 0, `other` is rank 1, and both must succeed.
template <typename Own, typename Other>
void check_both(ArenaSize size, const Own& own, const Other& other) {
    CHECK_EQ(run_both(Wire::kShm, size, own, other), 0);
}

}  // namespace

TEST(what_is_written_into_a_slot_arrives_when_it_is_published) {
    const auto own = [](Endpoint& endpoint) {
        const auto first = reserve(endpoint, 1, 4096);
        const auto second = reserve(endpoint, 2, 100);
        CHECK(first && second && first->bytes.get() != second->bytes.get());
        send(endpoint, 1, 3, 50);
        check_content(endpoint.take(1, 3, kForEver, nullptr));  // it has overtaken both
        fill(*second);
        endpoint.publish(1, *second);
        check_content(endpoint.take(1, 2, kForEver, nullptr));
        fill(*first);
        endpoint.publish(1, *first);
        check_content(endpoint.take(1, 1, kForEver, nullptr));
        CHECK_EQ(endpoint.counts().num_messages, 3U);
        CHECK_EQ(endpoint.counts().num_bytes, 4246U);
    };
    const auto other = [](Endpoint& endpoint) {
        for (const std::uint64_t tag : {3U, 2U, 1U}) {
            const auto message = endpoint.take(0, tag, kForEver, nullptr);
            check_content(message);
            send(endpoint, 0, tag, static_cast<std::size_t>(message->info.num_bytes));
        }
    };
    check_both({5, 4096}, own, other);
}

TEST(slots_are_used_again_and_again) {
    constexpr std::uint64_t kNumMessages = 500;
    const auto own = [](Endpoint& endpoint) {
        std::uint64_t num_reserved = 0;
        for (std::uint64_t tag = 0; tag < kNumMessages; ++tag) {
            if (const auto message = reserve(endpoint, tag, 1 + tag % 64)) {
                ++num_reserved;
                fill(*message);
                endpoint.publish(1, *message);
            } else {
                send(endpoint, 1, tag, 1 + tag % 64);
            }
        }
        CHECK(endpoint.flush(kForEver, nullptr));
        CHECK(num_reserved > 2);
        CHECK(endpoint.take(1, 1, kForEver, nullptr));
    };
    const auto other = [](Endpoint& endpoint) {
        for (std::uint64_t tag = 0; tag < kNumMessages; ++tag) {
            check_content(endpoint.take(0, tag, kForEver, nullptr));
        }
        send(endpoint, 0, 1, 0);
    };
    check_both({8, 64}, own, other);
}

TEST(what_no_slot_holds_is_not_handed_out) {
    const Signal end;
    for (const Wire wire : kWires) {
        const auto own = [&](Endpoint& endpoint) {
            CHECK(!reserve(endpoint, 1, 0));
            CHECK(!reserve(endpoint, 1, 65));
            CHECK_EQ(reserve(endpoint, 1, 64).has_value(), wire == Wire::kShm);
            end.give();
        };
        const auto other = [&](Endpoint&) { end.await(); };
        CHECK_EQ(run_both(wire, {8, 64}, own, other), 0);
    }
    Endpoint alone(1, {8, 64}, false);
    CHECK(!reserve(alone, 1, 64));  // to itself
}

TEST(a_slot_is_left_whatever_is_handed_out_and_kept) {
    for (const std::uint32_t num_slots : {1U, 2U, 3U, 4U, 7U, 8U}) {
        const auto own = [num_slots](Endpoint& endpoint) {
            std::vector<Message> reserved;
            while (auto message = reserve(endpoint, 1000 + reserved.size(), 64)) {
                reserved.push_back(std::move(*message));
            }
            CHECK_EQ(reserved.size(), (num_slots - 1) / 2);
            for (std::uint64_t tag = 0; tag < 40; ++tag) {
                send(endpoint, 1, tag, tag % 3 == 0 ? 1000 : 64);
            }
            CHECK(endpoint.flush(kForEver, nullptr));
            for (const Message& message : reserved) {
                fill(message);
                endpoint.publish(1, message);
            }
            CHECK(endpoint.take(1, 1, kForEver, nullptr));
        };
        const auto other = [num_slots](Endpoint& endpoint) {
            std::vector<std::optional<Message>> kept;
            for (std::uint64_t tag = 0; tag < 40; ++tag) {
                kept.push_back(endpoint.take(0, tag, kForEver, nullptr));
                check_content(kept.back());
            }
            for (std::uint64_t i = 0; i < (num_slots - 1) / 2; ++i) {
                check_content(endpoint.take(0, 1000 + i, kForEver, nullptr));
            }
            send(endpoint, 0, 1, 0);
        };
        check_both({num_slots, 64}, own, other);
    }
}

TEST(what_is_published_does_not_cut_into_a_message_in_pieces) {
    const Signal sent;
    const auto own = [&](Endpoint& endpoint) {
        const auto reserved = reserve(endpoint, 1, 64);
        CHECK(reserved.has_value());
        send(endpoint, 1, 2, 1000);
        CHECK_EQ(report(endpoint).counts.num_queued, 1U);
        fill(*reserved);
        endpoint.publish(1, *reserved);
        CHECK_EQ(report(endpoint).counts.num_queued, 2U);
        CHECK(!reserve(endpoint, 3, 64));  // queued messages have priority
        sent.give();
        CHECK(endpoint.flush(kForEver, nullptr));
        CHECK(endpoint.take(1, 1, kForEver, nullptr));
    };
    const auto other = [&](Endpoint& endpoint) {
        sent.await();
        check_content(endpoint.take(0, 1, kForEver, nullptr));
        check_content(endpoint.take(0, 2, kForEver, nullptr));
        send(endpoint, 0, 1, 0);
    };
    check_both({4, 64}, own, other);
}

TEST(only_what_was_reserved_is_published_and_once) {
    const Signal end;
    for (const Wire wire : kWires) {
        const auto own = [&](Endpoint& endpoint) {
            const std::shared_ptr<std::byte> bytes(new std::byte[8],
                                                   std::default_delete<std::byte[]>());
            const Message foreign{{}, bytes};
            CHECK_THROWS(endpoint.publish(1, foreign), std::invalid_argument, "reserved");
            if (const auto message = reserve(endpoint, 1, 8)) {
                endpoint.publish(1, *message);
                CHECK_THROWS(endpoint.publish(1, *message), std::invalid_argument, "once");
            }
            CHECK_THROWS(endpoint.publish(2, foreign), std::invalid_argument, "no link to rank 2");
            end.give();
        };
        const auto other = [&](Endpoint&) { end.await(); };
        CHECK_EQ(run_both(wire, {4, 64}, own, other), 0);
    }
}

TEST(a_killed_peer_takes_no_memory_along) {
    const Signal kill;
    std::optional<Message> reserved;
    const auto own = [&](Endpoint& endpoint) {
        reserved = reserve(endpoint, 1, 64);
        CHECK(reserved.has_value());
        kill.give();
        CHECK(!endpoint.take(1, 9, kForEver, nullptr));
        CHECK(report(endpoint).state == PeerState::kDied);
        fill(*reserved);  // a device writes regardless of the peer's end
        CHECK_THROWS(endpoint.publish(1, *reserved), TransportError, "rank 1 is not open");
        CHECK_THROWS(reserve(endpoint, 2, 64), TransportError, "rank 1 is not open");
    };
    const auto other = [&](Endpoint&) {
        kill.await();
        ::raise(SIGKILL);
    };
    const int status = run_both(Wire::kShm, {4, 64}, own, other);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    fill(*reserved);  // the endpoint is gone too
    check_content(reserved);
}

TEST(memory_that_is_handed_out_outlives_close_and_abort) {
    const Signal end;
    std::vector<std::optional<Message>> reserved;
    const auto own = [&](Endpoint& endpoint) {
        reserved.push_back(reserve(endpoint, 1, 64));
        reserved.push_back(reserve(endpoint, 2, 64));
        endpoint.abort("out of memory");
        end.await();
        endpoint.close();
        for (const auto& message : reserved) {
            fill(*message);
            CHECK_THROWS(endpoint.publish(1, *message), std::invalid_argument, "no link to rank 1");
        }
    };
    const auto other = [&](Endpoint& endpoint) {
        CHECK(!endpoint.take(0, 1, kForEver, nullptr));
        CHECK(report(endpoint).reason == "out of memory");
        end.give();
    };
    check_both({5, 64}, own, other);
    check_content(reserved[0]);
    check_content(reserved[1]);
}

TEST(one_thread_publishes_what_another_reserves) {
    constexpr std::uint64_t kNumMessages = 300;
    const auto own = [](Endpoint& endpoint) {
        std::mutex mutex;
        std::deque<Message> filled;
        std::thread publisher([&] {
            for (std::uint64_t done = 0; done < kNumMessages;) {
                std::optional<Message> next;
                {
                    const std::lock_guard lock(mutex);
                    if (!filled.empty()) {
                        next = std::move(filled.front());
                        filled.pop_front();
                    }
                }
                if (next) {
                    fill(*next);  // like a device, some time after the other thread
                    endpoint.publish(1, *next);
                    ++done;
                } else {
                    std::this_thread::yield();
                }
            }
        });
        for (std::uint64_t tag = 0; tag < kNumMessages;) {
            if (auto message = reserve(endpoint, tag, 1 + tag % 64)) {
                ++tag;
                const std::lock_guard lock(mutex);
                filled.push_back(std::move(*message));
            } else {
                endpoint.take(1, 1, deadline_after(0.001), nullptr);
            }
        }
        publisher.join();
        CHECK(endpoint.flush(kForEver, nullptr));
        CHECK(endpoint.take(1, 2, kForEver, nullptr));
    };
    const auto other = [](Endpoint& endpoint) {
        for (std::uint64_t tag = 0; tag < kNumMessages; ++tag) {
            check_content(endpoint.take(0, tag, kForEver, nullptr));
        }
        send(endpoint, 0, 2, 0);
    };
    check_both({8, 64}, own, other);
}

TEST(a_forked_child_publishes_nothing) {
    const auto own = [](Endpoint& endpoint) {
        const auto reserved = reserve(endpoint, 1, 64);
        const pid_t child = fork_child([&] {
            CHECK_THROWS(endpoint.publish(1, *reserved), TransportError, "forked child");
            CHECK_THROWS(reserve(endpoint, 2, 64), TransportError, "forked child");
        });
        CHECK_EQ(join_child(child), 0);
        fill(*reserved);
        endpoint.publish(1, *reserved);
        CHECK(endpoint.take(1, 1, kForEver, nullptr));
    };
    const auto other = [](Endpoint& endpoint) {
        check_content(endpoint.take(0, 1, kForEver, nullptr));
        send(endpoint, 0, 1, 0);
    };
    check_both({4, 64}, own, other);
}
