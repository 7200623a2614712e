#include <fcntl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/arena.h"
#include "core/errors.h"
#include "core/inbox.h"
#include "core/outbox.h"

using namespace megatron_ext;

namespace {

UniqueFd duplicate(int fd) { return UniqueFd(::fcntl(fd, F_DUPFD_CLOEXEC, 0)); }

std::shared_ptr<ProcessBell> new_bell() {
    return std::make_shared<ProcessBell>(ProcessBell::create());
}

/// Both ends of an arena in one process; each side has a bell.
struct Ends {
    explicit Ends(ArenaSize size, bool checksums = false)
        : inbox(5, size, BufferPool()),
          outbox(Arena::attach(duplicate(inbox.fd())), receiver_bell, checksums) {
        inbox.set_sender_bell(sender_bell);
    }

    std::shared_ptr<ProcessBell> receiver_bell = new_bell();
    std::shared_ptr<ProcessBell> sender_bell = new_bell();
    Inbox inbox;
    Outbox outbox;
};

/// Releases the owners of sent messages.
struct Forget final : LinkEvents {
    void arrived(Message) override {}
    void sent(std::shared_ptr<void>) override {}
};

void push(Outbox& outbox) {
    Forget events;
    outbox.push(events);
}

std::vector<unsigned char> content(std::uint64_t tag, std::size_t num_bytes) {
    std::vector<unsigned char> bytes(num_bytes);
    for (std::size_t i = 0; i < num_bytes; ++i) {
        bytes[i] = static_cast<unsigned char>(tag * 31 + i * 7 + i / 251);
    }
    return bytes;
}

void send(Outbox& outbox, std::uint64_t tag, std::size_t num_bytes) {
    MessageInfo info;
    info.tag = tag;
    info.num_bytes = num_bytes;
    auto bytes = std::make_shared<std::vector<unsigned char>>(content(tag, num_bytes));
    Forget events;
    outbox.send(info, bytes->data(), bytes, events);
}

void check_content(const Message& message) {
    const auto num_bytes = static_cast<std::size_t>(message.info.num_bytes);
    const auto expected = content(message.info.tag, num_bytes);
    CHECK(num_bytes == 0 || std::memcmp(message.bytes.get(), expected.data(), num_bytes) == 0);
}

Arena attach_with(std::size_t offset, std::uint32_t value) {
    const Arena arena = Arena::create({2, 64});
    Segment segment = Segment::attach(duplicate(arena.fd()));
    std::memcpy(static_cast<char*>(segment.data()) + offset, &value, sizeof(value));
    return Arena::attach(duplicate(arena.fd()));
}

}  // namespace

TEST(impossible_arenas_are_refused) {
    CHECK_THROWS(Arena::create({0, 64}), std::invalid_argument, "got 0 of 64");
    CHECK_THROWS(Arena::create({4, 0}), std::invalid_argument, "got 4 of 0");
    CHECK_THROWS(Arena::create({Arena::kMaxSlots + 1, 1}), std::invalid_argument, "1 to 1024");
    CHECK_THROWS(Arena::create({1024, std::uint64_t{1} << 40}), TransportError, "bytes");
}

TEST(foreign_segments_are_refused) {
    CHECK_EQ(attach_with(12, 2).size().num_slots, 2U);  // unchanged: valid
    CHECK_THROWS(attach_with(0, 1), TransportError, "something else");
    CHECK_THROWS(attach_with(8, 9), TransportError, "another version");
    CHECK_THROWS(attach_with(12, 3), TransportError, "3 slots of 64 bytes do not fill");
    CHECK_THROWS(Arena::attach(duplicate(Segment::create(64).fd())), TransportError, "only 64");
}

TEST(short_messages_stay_in_their_slot) {
    Ends link({4, 1000}, true);
    send(link.outbox, 1, 1000);
    send(link.outbox, 2, 0);
    CHECK_EQ(link.receiver_bell->sequence(), 2U);
    std::optional<Message> first = link.inbox.next();
    CHECK_EQ(link.inbox.num_held(), 1U);
    CHECK_EQ(link.inbox.next()->info.num_bytes, 0U);
    CHECK_EQ(link.inbox.num_held(), 1U);
    check_content(*first);
    first.reset();
    CHECK_EQ(link.inbox.num_held(), 0U);
    CHECK(!link.inbox.next());
}

TEST(whoever_keeps_messages_leaves_room_for_others) {
    for (const std::uint32_t num_slots : {1U, 2U, 3U, 8U, 100U}) {
        Ends link({num_slots, 64});
        std::vector<Message> kept;
        for (std::uint64_t tag = 0; tag < 300; ++tag) {
            send(link.outbox, tag, 64);
            CHECK_EQ(link.outbox.num_queued(), 0U);
            kept.push_back(*link.inbox.next());
        }
        CHECK_EQ(link.inbox.num_held(), num_slots / 2);
        for (const Message& message : kept) {
            check_content(message);
        }
    }
}

TEST(slots_return_in_any_order) {
    Ends link({6, 64});
    std::vector<Message> kept;
    for (std::uint64_t tag = 0; tag < 200; ++tag) {
        send(link.outbox, tag, 1 + tag % 64);
        kept.push_back(*link.inbox.next());
        check_content(kept.back());
        if (kept.size() > 3) {
            kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(tag * 7 % kept.size()));
        }
    }
}

TEST(the_slot_that_was_given_back_last_is_used_next) {
    Ends link({4, 4096});
    const std::byte* slot = nullptr;
    for (std::uint64_t tag = 0; tag < 5; ++tag) {
        send(link.outbox, tag, 100);
        const std::optional<Message> message = link.inbox.next();
        CHECK(message.has_value());
        CHECK(slot == nullptr || message->bytes.get() == slot);
        slot = message->bytes.get();
    }
}

TEST(a_sender_without_room_queues_and_is_rung) {
    Ends link({2, 64});
    for (std::uint64_t tag = 0; tag < 5; ++tag) {
        send(link.outbox, tag, 10);
    }
    CHECK_EQ(link.outbox.num_queued(), 3U);
    CHECK_EQ(link.sender_bell->sequence(), 0U);
    std::vector<std::uint64_t> tags;
    while (tags.size() < 5) {
        while (const std::optional<Message> message = link.inbox.next()) {
            check_content(*message);
            tags.push_back(message->info.tag);
        }
        push(link.outbox);
    }
    CHECK((tags == std::vector<std::uint64_t>{0, 1, 2, 3, 4}));
    CHECK(link.sender_bell->sequence() >= 1);
    CHECK_EQ(link.outbox.num_queued(), 0U);
}

TEST(long_messages_go_through_in_pieces) {
    Ends link({3, 100}, true);
    send(link.outbox, 1, 1050);
    send(link.outbox, 2, 100);
    send(link.outbox, 3, 101);
    std::vector<Message> received;
    while (received.size() < 3) {
        while (std::optional<Message> message = link.inbox.next()) {
            received.push_back(std::move(*message));
        }
        push(link.outbox);
    }
    for (std::size_t i = 0; i < 3; ++i) {
        CHECK_EQ(received[i].info.tag, i + 1);
        check_content(received[i]);
    }
}

TEST(the_owner_is_kept_until_the_bytes_are_copied) {
    Ends link({1, 64});
    auto owner = std::make_shared<int>(0);
    const std::vector<char> bytes(128);
    MessageInfo info;
    info.num_bytes = bytes.size();
    Forget events;
    link.outbox.send(info, bytes.data(), owner, events);
    CHECK_EQ(owner.use_count(), 2);
    CHECK(!link.inbox.next());
    push(link.outbox);
    CHECK_EQ(owner.use_count(), 1);
    CHECK(link.inbox.next());
}

TEST(damage_is_an_error) {
    {
        Ends link({2, 64}, true);
        send(link.outbox, 1, 64);
        const Arena arena = Arena::attach(duplicate(link.inbox.fd()));
        arena.bytes(arena.order(0))[63] ^= std::byte{1};
        CHECK_THROWS(link.inbox.next(), TransportError,
                     "bytes 0 to 64 of the 64 of tag 0x1 do not");
    }
    {
        Ends link({2, 64});
        send(link.outbox, 1, 64);
        const Arena arena = Arena::attach(duplicate(link.inbox.fd()));
        Descriptor& piece = arena.descriptor(arena.order(0));
        piece.piece_bytes = 65;
        CHECK_THROWS(link.inbox.next(), TransportError, "the header of piece 0 does not match");
        seal(piece);
        CHECK_THROWS(link.inbox.next(), TransportError, "a piece of 65 bytes at 0 of 64");
        piece.sequence = 3;
        seal(piece);
        CHECK_THROWS(link.inbox.next(), TransportError, "piece 3 arrived where piece 0");
        arena.order(0) = 2;
        CHECK_THROWS(link.inbox.next(), TransportError, "slot 2 of 2");
    }
}

TEST(no_flipped_bit_of_a_descriptor_goes_unnoticed) {
    MessageInfo info;
    info.tag = 7;
    info.num_bytes = 3;
    Descriptor piece = describe_piece(info, 1, 0, 3, nullptr, false);
    CHECK(is_intact(piece));
    auto* const bytes = reinterpret_cast<unsigned char*>(&piece);
    for (std::size_t bit = 0; bit < 8 * sizeof(piece); ++bit) {
        bytes[bit / 8] ^= static_cast<unsigned char>(1U << bit % 8);
        CHECK(!is_intact(piece));
        bytes[bit / 8] ^= static_cast<unsigned char>(1U << bit % 8);
    }
}

TEST(messages_outlive_their_link) {
    std::optional<Message> message;
    {
        Ends link({4, 64});
        send(link.outbox, 1, 64);
        message = link.inbox.next();
    }
    check_content(*message);
}

TEST(two_threads_and_a_third_that_lets_go) {
    Ends link({4, 128}, true);
    constexpr std::uint64_t kNumMessages = 3000;
    std::thread sender([&] {
        ProcessBell& bell = *link.sender_bell;
        for (std::uint64_t tag = 0; tag < kNumMessages; ++tag) {
            send(link.outbox, tag, tag * 37 % 400);
        }
        for (std::uint32_t seen = bell.sequence(); link.outbox.num_queued() > 0;) {
            push(link.outbox);
            if (link.outbox.num_queued() > 0) {
                CHECK(bell.wait(seen, kNever, nullptr));
            }
            seen = bell.sequence();
        }
    });
    ProcessBell& bell = *link.receiver_bell;
    for (std::uint64_t tag = 0; tag < kNumMessages;) {
        const std::uint32_t seen = bell.sequence();
        std::vector<Message> batch;
        while (std::optional<Message> message = link.inbox.next()) {
            CHECK_EQ(message->info.tag, tag++);
            batch.push_back(std::move(*message));
        }
        if (batch.empty()) {
            CHECK(bell.wait(seen, kNever, nullptr));
            continue;
        }
        std::thread([moved = std::move(batch)]() mutable {
            for (const Message& message : moved) {
                check_content(message);
            }
            moved.clear();
        }).join();
    }
    sender.join();
}
