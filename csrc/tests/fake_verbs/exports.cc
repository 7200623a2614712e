// A fake libibverbs for tests, selected by MEGATRON_EXT_IBVERBS_LIB: one device, fake0, with one
// port, whose queue pairs connect to each other within one process. A write is copied when it is
// posted, after an adapter's checks: state, keys, bounds, posted receive requests, room in
// completion queues. A violation completes with an error or, where an adapter's behaviour would be
// undefined, ends the process.
//
// The environment variable FAKE_VERBS, or fake_verbs_set_faults() while there are threads, injects
// faults. A comma-separated list of:
//   no_device            the host has no device
//   open=N               open_device fails with errno N
//   port_down            the port is down
//   infiniband           the port is InfiniBand
//   reg_mr=N             registering memory fails with errno N
//   rtr=N                the transition to "ready to receive" fails with errno N
//   rtr_gid=I            the same with EINVAL, for source GID I only
//   no_way=I             writes from GID I get no answer
//   wc=S                 writes complete with status S
//   post=N               posting writes fails with errno N
//   post_receive=N       posting receive requests fails with errno N
//   hold                 writes are neither performed nor completed until the fault is gone
// fake_verbs_async_event() raises an asynchronous event.

#include <arpa/inet.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "tests/fake_verbs/fabric.h"

using namespace fake_verbs;  // NOLINT: exports of C have no namespace

namespace {

template <typename T>
T* fail_with(int error_number) {
    errno = error_number;
    return nullptr;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

/// Raises an event on all open devices.
EXPORT void fake_verbs_async_event(int type, int port) {
    const Lock lock(mutex);
    for (FakeContext* context : fabric.contexts) {
        AsyncEvent event{};
        event.type = type;
        event.element.port = port;
        context->events.push_back(event);
        signal(context->async_fd);
    }
}

EXPORT void fake_verbs_set_faults(const char* list) {
    const Lock lock(mutex);
    fabric.faults = list;
}

/// Number of live objects.
EXPORT int fake_verbs_objects() {
    const Lock lock(mutex);
    return fabric.objects;
}

EXPORT int ibv_fork_init() { return 0; }

EXPORT Device** ibv_get_device_list(int* num_devices) {
    const int count = fault("no_device") ? 0 : 1;
    *num_devices = count;
    auto** const list = new Device*[2]();
    list[0] = count > 0 ? &fabric.device : nullptr;
    return list;
}

EXPORT void ibv_free_device_list(Device** list) { delete[] list; }

EXPORT const char* ibv_get_device_name(Device*) { return "fake0"; }

EXPORT Context* ibv_open_device(Device* device) {
    const Lock lock(mutex);
    if (const auto error_number = fault("open")) {
        return fail_with<Context>(*error_number);
    }
    auto* const context = new FakeContext{};
    context->device = device;
    context->ops.poll_cq = &poll_cq;
    context->ops.request_notify = &request_notify;
    context->ops.post_send = &post_send;
    context->ops.post_receive = &post_receive;
    context->async_fd = ::eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
    fabric.contexts.push_back(context);
    ++fabric.objects;
    return context;
}

EXPORT int ibv_close_device(Context* context) {
    const Lock lock(mutex);
    auto& contexts = fabric.contexts;
    contexts.erase(std::find(contexts.begin(), contexts.end(), context));
    ::close(context->async_fd);
    delete static_cast<FakeContext*>(context);
    --fabric.objects;
    return 0;
}

EXPORT int ibv_query_port(Context*, std::uint8_t port, PortAttr* attr) {
    if (port != 1) {
        return EINVAL;
    }
    *attr = {};
    attr->state = fault("port_down") ? kPortDown : kPortActive;
    attr->active_mtu = attr->max_mtu = 3;
    attr->gid_table_length = 5;
    attr->max_message_bytes = 1 << 16;
    attr->link_layer = fault("infiniband") ? kInfiniBand : kEthernet;
    attr->lid = fault("infiniband") ? 7 : 0;
    return 0;
}

/// GID 0 is link-local, 1 is ::ffff:10.77.0.1, 2 is empty, 3 is 2001:db8::1 and 4 is
/// ::ffff:172.17.0.1.
EXPORT int ibv_query_gid(Context*, std::uint8_t, int index, Gid* gid) {
    const char* const texts[] = {"fe80::1", "::ffff:10.77.0.1", "::", "2001:db8::1",
                                 "::ffff:172.17.0.1"};
    if (index < 0 || index > 4) {
        return EINVAL;
    }
    ::inet_pton(AF_INET6, texts[index], gid->raw);
    return 0;
}

EXPORT ProtectionDomain* ibv_alloc_pd(Context* context) {
    const Lock lock(mutex);
    ++fabric.objects;
    return new ProtectionDomain{context, 0};
}

EXPORT int ibv_dealloc_pd(ProtectionDomain* domain) {
    const Lock lock(mutex);
    --fabric.objects;
    delete domain;
    return 0;
}

EXPORT MemoryRegion* ibv_reg_mr(ProtectionDomain* domain, void* address, std::size_t num_bytes,
                                int) {
    const Lock lock(mutex);
    if (const auto error_number = fault("reg_mr")) {
        return fail_with<MemoryRegion>(*error_number);
    }
    const std::uint32_t key = fabric.next_number++;
    auto* const region =
        new MemoryRegion{domain->context, domain, address, num_bytes, key, key, key};
    fabric.regions[key] = region;
    ++fabric.objects;
    return region;
}

EXPORT int ibv_dereg_mr(MemoryRegion* region) {
    const Lock lock(mutex);
    fabric.regions.erase(region->lkey);
    delete region;
    --fabric.objects;
    return 0;
}

EXPORT CompletionChannel* ibv_create_comp_channel(Context* context) {
    const Lock lock(mutex);
    auto* const channel = new FakeChannel{};
    channel->context = context;
    channel->fd = ::eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
    ++fabric.objects;
    return channel;
}

EXPORT int ibv_destroy_comp_channel(CompletionChannel* channel) {
    const Lock lock(mutex);
    ::close(channel->fd);
    delete static_cast<FakeChannel*>(channel);
    --fabric.objects;
    return 0;
}

EXPORT CompletionQueue* ibv_create_cq(Context* context, int num_entries, void* user_data,
                                      CompletionChannel* channel, int) {
    const Lock lock(mutex);
    auto* const queue = new FakeQueue{};
    queue->context = context;
    queue->channel = channel;
    queue->user_data = user_data;
    queue->num_entries = num_entries;
    ++fabric.objects;
    return queue;
}

EXPORT int ibv_destroy_cq(CompletionQueue* queue) {
    const Lock lock(mutex);
    auto* const fake = static_cast<FakeQueue*>(queue);
    auto& events = static_cast<FakeChannel*>(queue->channel)->events;
    const auto untold = static_cast<unsigned>(std::count(events.begin(), events.end(), fake));
    if (fake->events_acknowledged != fake->events_told - untold) {
        misuse("a completion queue ends with events that were not acknowledged; this would hang");
    }
    events.erase(std::remove(events.begin(), events.end(), fake), events.end());
    delete fake;
    --fabric.objects;
    return 0;
}

EXPORT int ibv_get_cq_event(CompletionChannel* channel, CompletionQueue** queue,
                            void** user_data) {
    if (!consume(channel->fd)) {
        return -1;
    }
    const Lock lock(mutex);
    auto& events = static_cast<FakeChannel*>(channel)->events;
    *queue = events.front();
    *user_data = events.front()->user_data;
    events.pop_front();
    return 0;
}

EXPORT void ibv_ack_cq_events(CompletionQueue* queue, unsigned count) {
    const Lock lock(mutex);
    static_cast<FakeQueue*>(queue)->events_acknowledged += count;
}

EXPORT QueuePair* ibv_create_qp(ProtectionDomain* domain, QpInitAttr* attr) {
    const Lock lock(mutex);
    auto* const pair = new FakeQueuePair{};
    pair->context = domain->context;
    pair->domain = domain;
    pair->send_queue = attr->send_queue;
    pair->receive_queue = attr->receive_queue;
    pair->capacity = attr->capacity;
    pair->number = fabric.next_number++;
    fabric.queue_pairs[pair->number] = pair;
    ++fabric.objects;
    return pair;
}

EXPORT int ibv_modify_qp(QueuePair* queue_pair, QpAttr* attr, int mask) {
    const Lock lock(mutex);
    auto* const pair = static_cast<FakeQueuePair*>(queue_pair);
    if ((mask & kAttrState) == 0) {
        return EINVAL;
    }
    if (attr->state == kReset) {
        pair->receives.clear();
        pair->has_failed = false;
    } else if (attr->state != pair->state + 1 && attr->state != kError) {
        return EINVAL;
    }
    if (attr->state == kReadyToReceive) {
        const auto refused = fault("rtr_gid");
        if (refused && *refused == attr->address.route.source_index) {
            return EINVAL;
        }
        if (const auto error_number = fault("rtr")) {
            return *error_number;
        }
        pair->target = attr->dest_qp_number;
        pair->source_gid = attr->address.route.source_index;
    }
    pair->state = attr->state;
    return 0;
}

EXPORT int ibv_destroy_qp(QueuePair* queue_pair) {
    const Lock lock(mutex);
    fabric.queue_pairs.erase(queue_pair->number);
    delete static_cast<FakeQueuePair*>(queue_pair);
    --fabric.objects;
    return 0;
}

EXPORT int ibv_get_async_event(Context* context, AsyncEvent* event) {
    if (!consume(context->async_fd)) {
        return -1;
    }
    const Lock lock(mutex);
    auto& events = static_cast<FakeContext*>(context)->events;
    *event = events.front();
    events.pop_front();
    return 0;
}

EXPORT void ibv_ack_async_event(AsyncEvent*) {}

EXPORT const char* ibv_wc_status_str(int status) {
    switch (status) {
        case kFlushed:
            return "Work Request Flushed Error";
        case kRetryExceeded:
            return "transport retry counter exceeded";
        case kRnrRetryExceeded:
            return "RNR retry counter exceeded";
        default:
            return "another error";
    }
}

EXPORT const char* ibv_event_type_str(int type) {
    switch (type) {
        case kEventPortError:
            return "port error";
        case kEventPortActive:
            return "port active";
        case kEventDeviceFatal:
            return "local catastrophic error";
        default:
            return "another event";
    }
}
