#pragma once

#include <cstddef>
#include <string>

#include "rdma/verbs_abi.h"

namespace megatron_ext::verbs {

/// The functions of libibverbs that this package uses, resolved at run time. Linking would make the
/// library a dependency of every installation, and a copy bundled with a wheel would find no
/// devices, because drivers register with the system's library.
struct Library {
    std::string path;  ///< as passed to dlopen

    int (*fork_init)();
    Device** (*get_device_list)(int* num_devices);
    void (*free_device_list)(Device** list);
    const char* (*get_device_name)(Device* device);
    Context* (*open_device)(Device* device);
    int (*close_device)(Context* context);
    int (*query_port)(Context* context, std::uint8_t port, PortAttr* attr);
    int (*query_gid)(Context* context, std::uint8_t port, int index, Gid* gid);
    ProtectionDomain* (*alloc_pd)(Context* context);
    int (*dealloc_pd)(ProtectionDomain* domain);
    MemoryRegion* (*reg_mr)(ProtectionDomain* domain, void* address, std::size_t num_bytes,
                            int access);
    int (*dereg_mr)(MemoryRegion* region);
    CompletionChannel* (*create_comp_channel)(Context* context);
    int (*destroy_comp_channel)(CompletionChannel* channel);
    CompletionQueue* (*create_cq)(Context* context, int num_entries, void* user_data,
                                  CompletionChannel* channel, int vector);
    int (*destroy_cq)(CompletionQueue* queue);
    int (*get_cq_event)(CompletionChannel* channel, CompletionQueue** queue, void** user_data);
    void (*ack_cq_events)(CompletionQueue* queue, unsigned num_events);
    QueuePair* (*create_qp)(ProtectionDomain* domain, QpInitAttr* attr);
    int (*modify_qp)(QueuePair* queue_pair, QpAttr* attr, int mask);
    int (*destroy_qp)(QueuePair* queue_pair);
    int (*get_async_event)(Context* context, AsyncEvent* event);
    void (*ack_async_event)(AsyncEvent* event);
    const char* (*wc_status_str)(int status);
    const char* (*event_type_str)(int type);
};

/// The library: $MEGATRON_EXT_IBVERBS_LIB if set, otherwise the system's. Opened once for each path
/// and never closed, since the drivers that it loads stay loaded. Any thread may call this. Throws
/// RdmaError if the library is missing or lacks a function.
const Library& load_library();

}  // namespace megatron_ext::verbs
