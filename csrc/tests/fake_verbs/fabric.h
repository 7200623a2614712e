#pragma once

// The queue pairs of the fake libibverbs, and the writes between them.

#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "rdma/verbs_abi.h"

namespace megatron_ext::verbs {
struct Device {};
}  // namespace megatron_ext::verbs

namespace fake_verbs {

using namespace megatron_ext::verbs;  // NOLINT: the other side of that interface

struct FakeQueue : CompletionQueue {
    std::deque<WorkCompletion> completions;
    bool armed = false;
    unsigned events_told = 0;
    unsigned events_acknowledged = 0;
};

struct FakeChannel : CompletionChannel {
    std::deque<FakeQueue*> events;
};

struct FakeQueuePair : QueuePair {
    QpCapacity capacity;
    std::uint32_t target = 0;
    int source_gid = -1;
    std::deque<std::uint64_t> receives;
    std::deque<SendRequest> held;
    std::vector<MemoryPiece> held_pieces;
    std::uint32_t sends_outstanding = 0;
    bool has_failed = false;
};

struct FakeContext : Context {
    std::deque<AsyncEvent> events;
};

struct Fabric {
    Device device;
    std::map<std::uint32_t, FakeQueuePair*> queue_pairs;
    std::map<std::uint32_t, MemoryRegion*> regions;
    std::vector<FakeContext*> contexts;
    std::string faults;  ///< instead of those in the environment
    std::uint32_t next_number = 100;
    int objects = 0;  ///< number of live objects
};

extern Fabric fabric;

/// One mutex for everything, because speed is irrelevant here.
extern std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

/// The value of a fault that is currently injected; 0 if the fault has no value.
std::optional<int> fault(const std::string& name);

/// Ends the process; for calls that no correct program makes.
[[noreturn]] void misuse(const char* what);

/// A list of events with an eventfd that counts them. consume() takes an event; it returns false,
/// with errno, if there is none.
void signal(int fd);
bool consume(int fd);

/// The operations of the data path.
int post_send(QueuePair* queue_pair, SendRequest* request, SendRequest** bad);
int post_receive(QueuePair* queue_pair, ReceiveRequest* request, ReceiveRequest** bad);
int poll_cq(CompletionQueue* queue, int count, WorkCompletion* completions);
int request_notify(CompletionQueue* queue, int solicited_only);

}  // namespace fake_verbs
