#include <poll.h>
#include <sys/socket.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/errors.h"
#include "linked_processes.h"
#include "tcp/frame.h"
#include "tcp/sender.h"
#include "tcp/tcp_link.h"

using namespace megatron_ext;
using namespace megatron_ext::testing;

namespace {

/// A control frame without a text.
void seal_control(Descriptor& head) {
    head.checksum = checksum(nullptr, 0);
    seal(head);
}

/// A link as rank 0, and the bare socket of rank 1 in the same process.
struct Half {
    Half() : endpoint(0, {2, 64}, false) {
        auto [mine, theirs] = connected_sockets(Wire::kTcp);
        socket = std::move(theirs);
        link(endpoint, 1, Wire::kTcp, std::move(mine));
    }

    void write(const void* bytes, std::size_t num_bytes) const {
        CHECK(::send(socket.get(), bytes, num_bytes, MSG_NOSIGNAL) ==
              static_cast<ssize_t>(num_bytes));
    }
    void write_frame(std::uint32_t magic, std::uint64_t number) const {
        Descriptor head{};
        head.magic = magic;
        head.total_bytes = number;
        seal_control(head);
        write(&head, sizeof(head));
    }
    Descriptor read_head() const {
        Descriptor head{};
        CHECK(::recv(socket.get(), &head, sizeof(head), MSG_WAITALL) == sizeof(head));
        return head;
    }

    Endpoint endpoint;
    UniqueFd socket;
};

Descriptor piece_of(std::uint64_t sequence, std::uint64_t total_bytes, std::uint64_t offset_bytes,
                    std::uint64_t piece_bytes, std::uint64_t tag = 7) {
    MessageInfo info;
    info.tag = tag;
    info.num_bytes = total_bytes;
    return describe_piece(info, sequence, offset_bytes, piece_bytes, nullptr, false);
}

}  // namespace

TEST(the_cost_of_a_message_is_that_of_its_pieces) {
    CHECK_EQ(cost_of_message(0), cost_of_piece(0));
    CHECK_EQ(cost_of_message(5), cost_of_piece(5));
    CHECK_EQ(cost_of_message(kTcpPieceBytes), cost_of_piece(kTcpPieceBytes));
    CHECK_EQ(cost_of_message(2 * kTcpPieceBytes + 1),
             2 * cost_of_piece(kTcpPieceBytes) + cost_of_piece(1));
}

TEST(nothing_is_sent_without_room_at_the_receiver) {
    Half half;
    constexpr std::uint64_t kNumPieces = kFirstRoom / kTcpPieceBytes;
    for (std::uint64_t tag = 0; tag < kNumPieces; ++tag) {
        send_zeros(half.endpoint, 1, tag, kTcpPieceBytes);
    }
    for (std::uint64_t tag = 0; tag < kNumPieces; ++tag) {
        CHECK_EQ(half.read_head().tag, tag);
        std::vector<char> bytes(kTcpPieceBytes);
        CHECK(::recv(half.socket.get(), bytes.data(), bytes.size(), MSG_WAITALL) > 0);
    }
    CHECK(half.endpoint.flush(kForEver, nullptr));
    send(half.endpoint, 1, 90, 10);
    CHECK(!half.endpoint.flush(deadline_after(0.02), nullptr));
    CHECK_EQ(report(half.endpoint).counts.num_queued, 1U);
    half.write_frame(kRoomMagic, 2 * kFirstRoom);
    CHECK(half.endpoint.flush(kForEver, nullptr));
    CHECK_EQ(half.read_head().tag, 90U);
}

TEST(a_peer_that_is_stopped_is_not_dead) {
    Endpoint endpoint(0, {2, 64}, false);
    auto [mine, theirs] = connected_sockets(Wire::kTcp);
    endpoint.add(1, std::make_shared<TcpLink>(endpoint.context(1), std::move(mine), 1));
    constexpr std::uint64_t kNumPieces = kFirstRoom / kTcpPieceBytes;
    for (std::uint64_t tag = 0; tag < kNumPieces; ++tag) {  // more than the peer has room for
        send_zeros(endpoint, 1, tag, kTcpPieceBytes);
    }
    CHECK(!endpoint.take(1, 0, deadline_after(3), nullptr));
    CHECK(report(endpoint).state == PeerState::kOpen);
    std::vector<char> bytes(kNumPieces * (sizeof(Descriptor) + kTcpPieceBytes));
    CHECK(::recv(theirs.get(), bytes.data(), bytes.size(), MSG_WAITALL) > 0);
    CHECK(endpoint.flush(kForEver, nullptr));
}

TEST(a_receiver_allows_more_when_messages_are_let_go_or_when_it_waits) {
    Half half;
    constexpr std::uint64_t kBytes = kTcpPieceBytes;
    const std::vector<char> bytes(kBytes);
    for (std::uint64_t i = 0; i < 3; ++i) {  // less than half of the room
        const Descriptor head = piece_of(i, kBytes, 0, kBytes);
        half.write(&head, sizeof(head));
        half.write(bytes.data(), kBytes);
    }
    std::optional<Message> first = half.endpoint.take(1, 7, kForEver, nullptr);
    std::optional<Message> second = half.endpoint.take(1, 7, kForEver, nullptr);
    first.reset();
    second.reset();  // a quarter of the room is free again, which is worth a frame
    CHECK_EQ(half.read_head().total_bytes, kFirstRoom + 2 * cost_of_message(kBytes));
    // The kept messages fill the room, and are never taken.
    std::thread waiter([&] { CHECK(half.endpoint.take(1, 8, kForEver, nullptr)); });
    for (std::uint64_t i = 3; i < 10; ++i) {
        const Descriptor head = piece_of(i, kBytes, 0, kBytes);
        half.write(&head, sizeof(head));
        half.write(bytes.data(), kBytes);
    }
    while (half.read_head().total_bytes < kFirstRoom + 7 * cost_of_message(kBytes)) {
    }
    const Descriptor last = piece_of(10, 0, 0, 0, 8);
    half.write(&last, sizeof(last));
    waiter.join();
}

TEST(a_message_that_has_begun_is_allowed_to_its_end_though_nobody_waits) {
    Half half;
    constexpr std::uint64_t kTotalBytes = 10 * kFirstRoom;
    const Descriptor head = piece_of(0, kTotalBytes, 0, kTcpPieceBytes);
    half.write(&head, sizeof(head));
    CHECK_EQ(half.read_head().total_bytes, cost_of_message(kTotalBytes));
}

TEST(a_link_allows_more_by_itself_while_the_caller_waits) {
    struct Arrivals final : LinkEvents {
        void arrived(Message message) override { kept.push_back(std::move(message)); }
        void sent(std::shared_ptr<void>) override {}
        std::vector<Message> kept;
    } arrivals;
    auto [mine, socket] = connected_sockets(Wire::kTcp);
    const Endpoint endpoint(0, {2, 64}, false);
    TcpLink waiting(endpoint.context(1), std::move(mine), 5.0);
    constexpr std::uint64_t kBytes = kTcpPieceBytes;
    const std::vector<char> bytes(kBytes);
    std::uint64_t num_sent = 0;
    const auto give = [&, &to = socket](std::uint64_t num_pieces) {
        for (const std::uint64_t end = num_sent + num_pieces; num_sent < end;) {
            const Descriptor head = piece_of(num_sent++, kBytes, 0, kBytes);
            CHECK(::send(to.get(), &head, sizeof(head), 0) == sizeof(head));
            CHECK(::send(to.get(), bytes.data(), kBytes, 0) == static_cast<ssize_t>(kBytes));
            while (arrivals.kept.size() < num_sent) {
                pollfd entry{waiting.descriptors().at(0), POLLIN, 0};
                CHECK(::poll(&entry, 1, -1) == 1);
                waiting.progress(arrivals);
            }
        }
    };
    const auto read_room = [&, &from = socket] {  // 0 if no room is granted
        Descriptor head{};
        const ssize_t num_bytes = ::recv(from.get(), &head, sizeof(head), MSG_DONTWAIT);
        return num_bytes < 0 ? std::uint64_t{0} : head.total_bytes;
    };
    waiting.demand(true, arrivals);
    constexpr std::uint64_t kHalf = kFirstRoom / 2 / kBytes;
    give(kHalf - 1);
    CHECK_EQ(read_room(), 0U);
    give(1);
    CHECK_EQ(read_room(), kHalf * cost_of_piece(kBytes) + kFirstRoom);
    waiting.demand(false, arrivals);
    give(kHalf + 1);
    CHECK_EQ(read_room(), 0U);
}

TEST(what_is_no_frame_ends_the_endpoint) {
    const auto refused = [](const Descriptor& head, const char* text) {
        Half half;
        half.write(&head, sizeof(head));
        CHECK_THROWS(half.endpoint.take(1, 7, kForEver, nullptr), TransportError, text);
        CHECK_THROWS(send(half.endpoint, 1, 7, 1), TransportError, text);
    };
    Descriptor unknown{};
    refused(unknown, "rank 1 are damaged: the header after piece 0 does not match its checksum");
    seal(unknown);
    refused(unknown, "rank 1 are damaged: a frame of an unknown kind");
    refused(piece_of(3, 10, 0, 10), "piece 3 arrived where piece 0");
    refused(piece_of(0, kFirstRoom, 0, kTcpPieceBytes + 1), "a piece of 524289 bytes");
    refused(piece_of(0, 10, 5, 5), "does not continue");
    refused(piece_of(0, 10, 0, 0), "a piece of 0 bytes at 0 of 10 does not continue");
    refused(piece_of(0, UINT64_MAX, 0, 10), "of 18446744073709551615 does not continue");
    Descriptor reason{};
    reason.magic = kAbortedMagic;
    reason.piece_bytes = kMaxReasonBytes + 1;
    seal(reason);
    refused(reason, "unknown kind");
    reason.piece_bytes = 0;  // with a checksum that does not match the empty text
    seal(reason);
    refused(reason, "why it gave up does not match its checksum");
    Descriptor damaged = piece_of(0, 10, 0, 10);
    damaged.tag ^= 1;
    refused(damaged, "the header of piece 0 does not match its checksum");
}

TEST(the_thread_that_writes_lets_no_owner_go) {
    struct Owners final : LinkEvents {
        void arrived(Message) override {}
        void sent(std::shared_ptr<void> owner) override { all.push_back(std::move(owner)); }
        std::vector<std::shared_ptr<void>> all;
    } owners;
    auto [mine, theirs] = connected_sockets(Wire::kTcp);
    TcpSender sender(false);
    const auto bytes = std::make_shared<char>('x');
    MessageInfo info;
    info.num_bytes = 1;
    sender.queue(info, bytes.get(), bytes);
    CHECK_EQ(sender.write(mine.get(), owners), 0);
    CHECK_EQ(owners.all.size(), 1U);  // although there is another one, which may end at any time
}

TEST(an_end_without_farewell_is_a_death) {
    Half half;
    half.socket.reset();
    CHECK(!half.endpoint.take(1, 7, kForEver, nullptr));
    CHECK(report(half.endpoint).state == PeerState::kDied);
    CHECK(!report(half.endpoint).reason.empty());
}

TEST(frames_may_come_in_any_bits) {
    Half half;
    const Descriptor head = piece_of(0, 3, 0, 3);
    std::vector<char> bytes(sizeof(head) + 3, 'x');
    std::memcpy(bytes.data(), &head, sizeof(head));
    for (const char& byte : bytes) {
        half.write(&byte, 1);
    }
    const auto message = half.endpoint.take(1, 7, kForEver, nullptr);
    CHECK(message && std::memcmp(message->bytes.get(), "xxx", 3) == 0);
}

TEST(impossible_options_are_refused) {
    Endpoint endpoint(0, {2, 64}, false);
    const auto make = [&](Wire wire, double silence_s) {
        auto [mine, theirs] = connected_sockets(wire);
        return TcpLink(endpoint.context(1), std::move(mine), silence_s).state();
    };
    CHECK_THROWS(make(Wire::kTcp, 0.0), std::invalid_argument, "silence_s must be between");
    CHECK_THROWS(make(Wire::kShm, 5.0), TransportError, "cannot set option");
}
