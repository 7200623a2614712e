#pragma once

// The part of libibverbs' binary interface that this package uses, declared here so that a build
// does not need rdma-core's headers and every wheel can use RDMA on a host with libibverbs. The
// interface has been stable since symbol version IBVERBS_1.1. tests/test_verbs_abi.cc compares each
// size, offset and value with the system's header if that is installed.

#include <pthread.h>

#include <cstddef>
#include <cstdint>

namespace megatron_ext::verbs {

struct Device;  // opaque
struct Context;

enum PortState : int { kPortDown = 1, kPortInit = 2, kPortArmed = 3, kPortActive = 4 };
enum LinkLayer : std::uint8_t { kInfiniBand = 1, kEthernet = 2 };
enum QpState : int { kReset = 0, kInit = 1, kReadyToReceive = 2, kReadyToSend = 3, kError = 6 };
enum QpType : int { kReliableConnection = 2 };

enum QpAttrMask : int {
    kAttrState = 1 << 0,
    kAttrAccessFlags = 1 << 3,
    kAttrPkeyIndex = 1 << 4,
    kAttrPort = 1 << 5,
    kAttrAddress = 1 << 7,
    kAttrPathMtu = 1 << 8,
    kAttrTimeout = 1 << 9,
    kAttrRetryCount = 1 << 10,
    kAttrRnrRetry = 1 << 11,
    kAttrReceivePsn = 1 << 12,
    kAttrMaxReadAtomic = 1 << 13,
    kAttrMinRnrTimer = 1 << 15,
    kAttrSendPsn = 1 << 16,
    kAttrMaxDestReadAtomic = 1 << 17,
    kAttrDestQpNumber = 1 << 20,
};

enum AccessFlags : int { kLocalWrite = 1, kRemoteWrite = 2 };

enum EventType : int {
    kEventCqError = 0,
    kEventQpFatal = 1,
    kEventQpRequestError = 2,
    kEventQpAccessError = 3,
    kEventCommunicationEstablished = 4,
    kEventDeviceFatal = 8,
    kEventPortActive = 9,
    kEventPortError = 10,
    kEventGidChange = 18,
};

enum WcStatus : int {
    kSuccess = 0,
    kFlushed = 5,
    kRetryExceeded = 12,
    kRnrRetryExceeded = 13,
};

enum WcOpcode : int { kWcRdmaWrite = 1, kWcReceive = 128, kWcReceiveWithImmediate = 129 };
enum WrOpcode : int { kRdmaWrite = 0, kRdmaWriteWithImmediate = 1 };
enum SendFlags : unsigned { kSignaled = 2 };

/// Network byte order.
union Gid {
    std::uint8_t raw[16];
    std::uint64_t align;
};

struct PortAttr {
    int state;
    int max_mtu;
    int active_mtu;
    int gid_table_length;
    std::uint32_t capabilities;
    std::uint32_t max_message_bytes;
    std::uint32_t bad_pkey_counter;
    std::uint32_t qkey_violation_counter;
    std::uint16_t pkey_table_length;
    std::uint16_t lid;
    std::uint16_t sm_lid;
    std::uint8_t lmc;
    std::uint8_t max_vl_num;
    std::uint8_t sm_sl;
    std::uint8_t subnet_timeout;
    std::uint8_t init_type_reply;
    std::uint8_t active_width;
    std::uint8_t active_speed;
    std::uint8_t physical_state;
    std::uint8_t link_layer;
    std::uint8_t flags;
    std::uint16_t capabilities2;
};

struct ProtectionDomain {
    Context* context;
    std::uint32_t handle;
};

struct MemoryRegion {
    Context* context;
    ProtectionDomain* domain;
    void* address;
    std::size_t num_bytes;
    std::uint32_t handle;
    std::uint32_t lkey;
    std::uint32_t rkey;
};

struct CompletionChannel {
    Context* context;
    int fd;
    int num_references;
};

struct CompletionQueue {
    Context* context;
    CompletionChannel* channel;
    void* user_data;
    std::uint32_t handle;
    int num_entries;
    pthread_mutex_t mutex;
    pthread_cond_t condition;
    std::uint32_t completion_events_completed;
    std::uint32_t async_events_completed;
};

struct QueuePair {
    Context* context;
    void* user_data;
    ProtectionDomain* domain;
    CompletionQueue* send_queue;
    CompletionQueue* receive_queue;
    void* shared_receive_queue;
    std::uint32_t handle;
    std::uint32_t number;
    int state;
    int type;
    pthread_mutex_t mutex;
    pthread_cond_t condition;
    std::uint32_t events_completed;
};

struct QpCapacity {
    std::uint32_t max_send_requests;
    std::uint32_t max_receive_requests;
    std::uint32_t max_send_pieces;
    std::uint32_t max_receive_pieces;
    std::uint32_t max_inline_bytes;
};

struct QpInitAttr {
    void* user_data;
    CompletionQueue* send_queue;
    CompletionQueue* receive_queue;
    void* shared_receive_queue;
    QpCapacity capacity;
    int type;
    int signal_all;
};

struct GlobalRoute {
    Gid destination;
    std::uint32_t flow_label;
    std::uint8_t source_index;
    std::uint8_t hop_limit;
    std::uint8_t traffic_class;
};

struct AddressHandleAttr {
    GlobalRoute route;
    std::uint16_t dest_lid;
    std::uint8_t service_level;
    std::uint8_t source_path_bits;
    std::uint8_t static_rate;
    std::uint8_t is_global;
    std::uint8_t port;
};

struct QpAttr {
    int state;
    int current_state;
    int path_mtu;
    int path_migration_state;
    std::uint32_t qkey;
    std::uint32_t receive_psn;
    std::uint32_t send_psn;
    std::uint32_t dest_qp_number;
    unsigned access_flags;
    QpCapacity capacity;
    AddressHandleAttr address;
    AddressHandleAttr alternate_address;
    std::uint16_t pkey_index;
    std::uint16_t alternate_pkey_index;
    std::uint8_t drained_notify;
    std::uint8_t draining;
    std::uint8_t max_read_atomic;
    std::uint8_t max_dest_read_atomic;
    std::uint8_t min_rnr_timer;
    std::uint8_t port;
    std::uint8_t timeout;
    std::uint8_t retry_count;
    std::uint8_t rnr_retry;
    std::uint8_t alternate_port;
    std::uint8_t alternate_timeout;
    std::uint32_t rate_limit;
};

struct MemoryPiece {
    std::uint64_t address;
    std::uint32_t num_bytes;
    std::uint32_t lkey;
};

/// Unions in the original that RDMA writes do not use are padding here.
struct SendRequest {
    std::uint64_t id;
    SendRequest* next;
    MemoryPiece* pieces;
    int num_pieces;
    int opcode;
    unsigned flags;
    std::uint32_t immediate;  ///< network byte order
    std::uint64_t remote_address;
    std::uint32_t rkey;
    std::uint32_t unused1[7];
    std::uint64_t unused2[6];
};

struct ReceiveRequest {
    std::uint64_t id;
    ReceiveRequest* next;
    MemoryPiece* pieces;
    int num_pieces;
};

struct WorkCompletion {
    std::uint64_t id;
    int status;
    int opcode;
    std::uint32_t vendor_error;
    std::uint32_t num_bytes;
    std::uint32_t immediate;  ///< network byte order
    std::uint32_t qp_number;
    std::uint32_t source_qp;
    unsigned flags;
    std::uint16_t pkey_index;
    std::uint16_t source_lid;
    std::uint8_t service_level;
    std::uint8_t path_bits;
};

struct AsyncEvent {
    union {
        CompletionQueue* queue;
        QueuePair* queue_pair;
        int port;
    } element;
    int type;
};

/// Holds the data path's operations, which are called through the context, like the inline
/// functions of the original header. Unused members are padding.
struct ContextOps {
    void* unused1[11];
    int (*poll_cq)(CompletionQueue*, int, WorkCompletion*);
    int (*request_notify)(CompletionQueue*, int solicited_only);
    void* unused2[12];
    int (*post_send)(QueuePair*, SendRequest*, SendRequest** bad);
    int (*post_receive)(QueuePair*, ReceiveRequest*, ReceiveRequest** bad);
    void* unused3[5];
};

struct Context {
    Device* device;
    ContextOps ops;
    int command_fd;
    int async_fd;
    int num_completion_vectors;
    pthread_mutex_t mutex;
    void* abi_compatibility;
};

}  // namespace megatron_ext::verbs
