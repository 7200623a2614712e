#include "tests/fake_verbs/fabric.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake_verbs {

Fabric fabric;
std::recursive_mutex mutex;

std::optional<int> fault(const std::string& name) {
    const Lock lock(mutex);
    const char* const list = std::getenv("FAKE_VERBS");
    std::string rest = fabric.faults.empty() && list != nullptr ? list : fabric.faults;
    while (!rest.empty()) {
        const std::size_t end = std::min(rest.find(','), rest.size());
        const std::string item = rest.substr(0, end);
        rest.erase(0, end + 1);
        if (item.substr(0, item.find('=')) == name) {
            const std::size_t value = item.find('=');
            return value == std::string::npos ? 0 : std::atoi(item.c_str() + value + 1);
        }
    }
    return std::nullopt;
}

void misuse(const char* what) {
    std::fprintf(stderr, "fake verbs: %s\n", what);
    std::abort();
}

void signal(int fd) {
    const std::uint64_t one = 1;
    if (::write(fd, &one, sizeof(one)) != sizeof(one)) {
        misuse("an eventfd takes no event");
    }
}

bool consume(int fd) {
    std::uint64_t count = 0;
    return ::read(fd, &count, sizeof(count)) == sizeof(count);
}

namespace {

void complete(FakeQueue* queue, const WorkCompletion& completion) {
    if (static_cast<int>(queue->completions.size()) >= queue->num_entries) {
        misuse("a completion queue overflows");
    }
    queue->completions.push_back(completion);
    if (queue->armed) {
        queue->armed = false;
        auto* const channel = static_cast<FakeChannel*>(queue->channel);
        channel->events.push_back(queue);
        ++queue->events_told;
        signal(channel->fd);
    }
}

bool within(const MemoryRegion* region, std::uint64_t address, std::uint64_t num_bytes) {
    const auto begin = reinterpret_cast<std::uint64_t>(region->address);
    return address >= begin && num_bytes <= region->num_bytes &&
           address - begin <= region->num_bytes - num_bytes;
}

void fail(FakeQueuePair* pair, std::uint64_t id, int status) {
    WorkCompletion completion{};
    completion.id = id;
    completion.status = pair->has_failed ? static_cast<int>(kFlushed) : status;
    completion.vendor_error = 0x81;
    completion.qp_number = pair->number;
    pair->has_failed = true;
    pair->state = kError;
    complete(static_cast<FakeQueue*>(pair->send_queue), completion);
    for (; !pair->receives.empty(); pair->receives.pop_front()) {
        completion.id = pair->receives.front();
        completion.status = kFlushed;
        complete(static_cast<FakeQueue*>(pair->receive_queue), completion);
    }
}

/// Processes one write, like an adapter.
void execute(FakeQueuePair* pair, const SendRequest& request, const MemoryPiece& piece) {
    const auto found = fabric.queue_pairs.find(pair->target);
    if (pair->has_failed) {
        fail(pair, request.id, kFlushed);
        return;
    }
    if (const auto status = fault("wc")) {
        fail(pair, request.id, *status);
        return;
    }
    if (const auto index = fault("no_way"); index && *index == pair->source_gid) {
        fail(pair, request.id, kRetryExceeded);
        return;
    }
    if (found == fabric.queue_pairs.end() || found->second->state < kReadyToReceive ||
        found->second->state == kError) {
        fail(pair, request.id, kRetryExceeded);
        return;
    }
    FakeQueuePair* const target = found->second;
    const std::uint64_t num_bytes = request.num_pieces == 0 ? 0 : piece.num_bytes;
    if (num_bytes > 0) {
        const auto local = fabric.regions.find(piece.lkey);
        const auto remote = fabric.regions.find(request.rkey);
        if (local == fabric.regions.end() || !within(local->second, piece.address, num_bytes)) {
            fail(pair, request.id, 4);  // local protection error
            return;
        }
        if (remote == fabric.regions.end() ||
            !within(remote->second, request.remote_address, num_bytes)) {
            fail(pair, request.id, 10);  // remote access error
            return;
        }
        std::memcpy(reinterpret_cast<void*>(request.remote_address),
                    reinterpret_cast<const void*>(piece.address), num_bytes);
    }
    WorkCompletion completion{};
    if (request.opcode == kRdmaWriteWithImmediate) {
        if (target->receives.empty()) {
            fail(pair, request.id, kRnrRetryExceeded);
            return;
        }
        completion.id = target->receives.front();
        completion.opcode = kWcReceiveWithImmediate;
        completion.immediate = request.immediate;
        completion.qp_number = target->number;
        target->receives.pop_front();
        complete(static_cast<FakeQueue*>(target->receive_queue), completion);
    }
    if ((request.flags & kSignaled) != 0) {
        completion = {};
        completion.id = request.id;
        completion.opcode = kWcRdmaWrite;
        completion.qp_number = pair->number;
        complete(static_cast<FakeQueue*>(pair->send_queue), completion);
    }
}

void run_held(FakeQueuePair* pair) {
    while (!pair->held.empty() && !fault("hold")) {
        const SendRequest request = pair->held.front();
        const MemoryPiece piece = pair->held_pieces.front();
        pair->held.pop_front();
        pair->held_pieces.erase(pair->held_pieces.begin());
        execute(pair, request, piece);
    }
}

}  // namespace

int post_send(QueuePair* queue_pair, SendRequest* request, SendRequest** bad) {
    const Lock lock(mutex);
    auto* const pair = static_cast<FakeQueuePair*>(queue_pair);
    *bad = request;
    if (const auto error_number = fault("post")) {
        return *error_number;
    }
    if (pair->state != kReadyToSend && pair->state != kError) {
        return EINVAL;
    }
    if (pair->held.size() >= pair->capacity.max_send_requests) {
        return ENOMEM;
    }
    pair->held.push_back(*request);
    pair->held_pieces.push_back(request->num_pieces > 0 ? *request->pieces : MemoryPiece{});
    run_held(pair);
    return 0;
}

int post_receive(QueuePair* queue_pair, ReceiveRequest* request, ReceiveRequest** bad) {
    const Lock lock(mutex);
    auto* const pair = static_cast<FakeQueuePair*>(queue_pair);
    *bad = request;
    if (const auto error_number = fault("post_receive")) {
        return *error_number;
    }
    if (pair->state == kReset) {
        return EINVAL;
    }
    if (pair->receives.size() >= pair->capacity.max_receive_requests) {
        return ENOMEM;
    }
    pair->receives.push_back(request->id);
    return 0;
}

int poll_cq(CompletionQueue* queue, int count, WorkCompletion* completions) {
    const Lock lock(mutex);
    for (auto& [number, pair] : fabric.queue_pairs) {
        run_held(pair);
    }
    auto& waiting = static_cast<FakeQueue*>(queue)->completions;
    int polled = 0;
    for (; polled < count && !waiting.empty(); ++polled) {
        completions[polled] = waiting.front();
        waiting.pop_front();
    }
    return polled;
}

int request_notify(CompletionQueue* queue, int /*solicited_only*/) {
    const Lock lock(mutex);
    static_cast<FakeQueue*>(queue)->armed = true;
    return 0;
}

}  // namespace fake_verbs
