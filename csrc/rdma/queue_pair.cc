#include "rdma/queue_pair.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <random>
#include <system_error>

#include "rdma/errors.h"

namespace megatron_ext {
namespace {

constexpr std::uint32_t kPsnMask = 0xFFFFFF;
constexpr std::uint8_t kHopLimit = 64;     // crosses routers, unlike 1
constexpr std::uint8_t kMinRnrTimer = 12;  // 0.64 ms
constexpr std::uint8_t kRnrRetry = 7;      // forever; receives are posted ahead of every write

std::string error_text(int error_number) {
    return std::generic_category().message(error_number) + " (errno " +
           std::to_string(error_number) + ")";
}

/// Returns the result of `make`; throws RdmaError if it is null.
template <typename Make>
auto require(Make make, const std::string& device, const std::string& what) {
    const auto object = make();
    const int error_number = errno;
    if (object == nullptr) {
        throw RdmaError("the RDMA device " + device + " cannot create " + what + ": " +
                            error_text(error_number),
                        "use fewer or smaller micro-batches, or see the kernel's log (dmesg)");
    }
    return object;
}

void make_non_blocking(int fd) {
    const int flags = ::fcntl(fd, F_GETFL);
    if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0) {
        throw_errno("cannot make a descriptor of an RDMA device non-blocking", errno);
    }
}

std::string locked_memory_limit() {
    rlimit limit{};
    ::getrlimit(RLIMIT_MEMLOCK, &limit);
    return limit.rlim_cur == RLIM_INFINITY ? "unlimited"
                                           : std::to_string(limit.rlim_cur) + " bytes";
}

}  // namespace

QueuePair::QueuePair(const std::string& device, Depth depth)
    : library_(verbs::load_library()),
      context_(open_device(device)),
      domain_(nullptr, Destroy(library_.dealloc_pd)),
      channel_(nullptr, Destroy(library_.destroy_comp_channel)),
      queue_(nullptr, Destroy(library_.destroy_cq)),
      queue_pair_(nullptr, Destroy(library_.destroy_qp)),
      depth_(depth),
      first_psn_(std::random_device()() & kPsnMask) {
    verbs::Context* const context = context_.get();
    domain_.reset(
        require([&] { return library_.alloc_pd(context); }, device, "protection domain"));
    channel_.reset(require([&] { return library_.create_comp_channel(context); }, device,
                           "completion channel"));
    make_non_blocking(channel_->fd);
    make_non_blocking(context->async_fd);
    const auto entries = static_cast<int>(depth.sends + depth.receives);
    queue_.reset(require(
        [&] { return library_.create_cq(context, entries, nullptr, channel_.get(), 0); }, device,
        "completion queue of " + std::to_string(entries) + " entries"));
    verbs::QpInitAttr attr{};
    attr.send_queue = attr.receive_queue = queue_.get();
    attr.capacity = {depth.sends, depth.receives, 1, 1, 0};
    attr.type = verbs::kReliableConnection;
    queue_pair_.reset(require([&] { return library_.create_qp(domain_.get(), &attr); }, device,
                              "queue pair of " + std::to_string(depth.sends) + " sends and " +
                                  std::to_string(depth.receives) + " receives"));
}

RegisteredMemory QueuePair::register_memory(void* address, std::size_t num_bytes) {
    verbs::MemoryRegion* const region = library_.reg_mr(
        domain_.get(), address, num_bytes, verbs::kLocalWrite | verbs::kRemoteWrite);
    const int error_number = errno;
    if (region == nullptr) {
        const bool is_limit = error_number == ENOMEM || error_number == EPERM;
        throw RdmaError(
            std::to_string(num_bytes) + " bytes of memory cannot be registered for RDMA: " +
                error_text(error_number) + "; the limit of locked memory is " +
                locked_memory_limit(),
            is_limit ? "raise it: `ulimit -l unlimited`, for containers --ulimit memlock=-1, or "
                       "use fewer or smaller micro-batches"
                     : "see the kernel's log (dmesg)");
    }
    return RegisteredMemory(region, Destroy(library_.dereg_mr));
}

void QueuePair::modify(verbs::QpAttr& attr, int mask, const std::string& to_what) {
    const int error_number = library_.modify_qp(queue_pair_.get(), &attr, mask);
    if (error_number != 0) {
        throw RdmaError(text() + " cannot be " + to_what + ": " + error_text(error_number),
                        "make sure that both ends are on one network with the same MTU, or choose "
                        "the GID with MEGATRON_EXT_IB_GID_INDEX");
    }
}

void QueuePair::begin(const RdmaSource& source) {
    source_ = source;
    target_.reset();
    verbs::QpAttr attr{};
    attr.state = verbs::kReset;  // drops posted requests
    modify(attr, verbs::kAttrState, "reset");
    verbs::WorkCompletion dropped{};
    while (context_->ops.poll_cq(queue_.get(), 1, &dropped) > 0) {
        // Some drivers keep completions of dropped requests.
    }
    attr = {};
    attr.state = verbs::kInit;
    attr.port = source.port;
    attr.access_flags = verbs::kLocalWrite | verbs::kRemoteWrite;
    modify(attr,
           verbs::kAttrState | verbs::kAttrPkeyIndex | verbs::kAttrPort | verbs::kAttrAccessFlags,
           "initialised");
    for (std::uint32_t i = 0; i < depth_.receives; ++i) {
        post_receive();
    }
}

void QueuePair::connect(const RdmaTarget& target, const RdmaSettings& settings) {
    target_ = target;
    verbs::QpAttr attr{};
    attr.state = verbs::kReadyToReceive;
    attr.path_mtu = std::min(source_->mtu, target.mtu);
    attr.dest_qp_number = target.qp_number;
    attr.receive_psn = target.first_psn;
    attr.max_dest_read_atomic = 1;
    attr.min_rnr_timer = kMinRnrTimer;
    attr.address.port = source_->port;
    attr.address.service_level = settings.service_level;
    attr.address.dest_lid = target.lid;
    // Within an InfiniBand subnet the LID is the address; Ethernet has no LIDs.
    attr.address.is_global = source_->link_layer == verbs::kEthernet ? 1 : 0;
    std::copy(target.gid.bytes.begin(), target.gid.bytes.end(), attr.address.route.destination.raw);
    attr.address.route.source_index = static_cast<std::uint8_t>(source_->gid_index);
    attr.address.route.hop_limit = kHopLimit;
    attr.address.route.traffic_class = settings.traffic_class;
    modify(attr,
           verbs::kAttrState | verbs::kAttrAddress | verbs::kAttrPathMtu |
               verbs::kAttrDestQpNumber | verbs::kAttrReceivePsn | verbs::kAttrMaxDestReadAtomic |
               verbs::kAttrMinRnrTimer,
           "connected");
    attr = {};
    attr.state = verbs::kReadyToSend;
    attr.send_psn = first_psn_;
    attr.timeout = settings.timeout;
    attr.retry_count = settings.retry_count;
    attr.rnr_retry = kRnrRetry;
    attr.max_read_atomic = 1;
    modify(attr,
           verbs::kAttrState | verbs::kAttrSendPsn | verbs::kAttrTimeout | verbs::kAttrRetryCount |
               verbs::kAttrRnrRetry | verbs::kAttrMaxReadAtomic,
           "made ready to send");
}

void QueuePair::post_write(std::uint64_t id, const verbs::MemoryPiece& from,
                           std::uint64_t remote_address, std::uint32_t rkey,
                           std::optional<std::uint32_t> immediate, bool signaled) {
    verbs::MemoryPiece piece = from;
    verbs::SendRequest request{};
    request.id = id;
    request.pieces = &piece;
    request.num_pieces = piece.num_bytes > 0 ? 1 : 0;
    request.opcode = immediate ? verbs::kRdmaWriteWithImmediate : verbs::kRdmaWrite;
    request.flags = signaled ? verbs::kSignaled : 0U;
    request.immediate = htonl(immediate.value_or(0));
    request.remote_address = remote_address;
    request.rkey = rkey;
    verbs::SendRequest* bad = nullptr;
    const int result = context_->ops.post_send(queue_pair_.get(), &request, &bad);
    if (result != 0) {
        look_at_events();
        throw RdmaError(text() + " refused a write: " + error_text(std::abs(result)) + port_news_,
                        "see the kernel's log (dmesg)");
    }
}

void QueuePair::post_receive() {
    verbs::ReceiveRequest request{};
    verbs::ReceiveRequest* bad = nullptr;
    const int result = context_->ops.post_receive(queue_pair_.get(), &request, &bad);
    if (result != 0) {
        throw RdmaError(text() + " refused a receive request: " + error_text(std::abs(result)),
                        "see the kernel's log (dmesg)");
    }
}

std::optional<verbs::WorkCompletion> QueuePair::poll(const std::string& what) {
    verbs::WorkCompletion completion{};
    const int count = context_->ops.poll_cq(queue_.get(), 1, &completion);
    if (count == 0) {
        look_at_events();
        return std::nullopt;
    }
    if (count < 0) {
        throw RdmaError(text() + ": its completion queue failed", "see the kernel's log (dmesg)");
    }
    if (completion.status != verbs::kSuccess) {
        // Only one request failed. The others are flushed, and their completions may come first.
        verbs::WorkCompletion next{};
        while (completion.status == verbs::kFlushed &&
               context_->ops.poll_cq(queue_.get(), 1, &next) > 0) {
            completion = next;
        }
        look_at_events();
        throw_failed(completion, what);
    }
    return completion;
}

void QueuePair::arm() {
    verbs::CompletionQueue* queue = nullptr;
    void* user_data = nullptr;
    unsigned num_events = 0;
    while (library_.get_cq_event(channel_.get(), &queue, &user_data) == 0) {
        ++num_events;
    }
    if (num_events > 0) {
        library_.ack_cq_events(queue_.get(), num_events);
    }
    const int result = context_->ops.request_notify(queue_.get(), 0);
    if (result != 0) {
        throw RdmaError(text() + ": its completion queue reports no events: " +
                            error_text(std::abs(result)),
                        "see the kernel's log (dmesg)");
    }
}

/// Reads the asynchronous events of the device. A port that is down may recover: the device retries
/// writes until then, and the text of their failure mentions the port. Other failures are final.
void QueuePair::look_at_events() {
    pollfd entry{context_->async_fd, POLLIN, 0};
    verbs::AsyncEvent event{};
    while (::poll(&entry, 1, 0) > 0 && library_.get_async_event(context_.get(), &event) == 0) {
        const std::string name = library_.event_type_str(event.type);
        library_.ack_async_event(&event);
        const bool of_port = event.type == verbs::kEventPortError ||
                             event.type == verbs::kEventPortActive ||
                             event.type == verbs::kEventGidChange;
        if (of_port && source_ && event.element.port != source_->port) {
            continue;
        }
        switch (event.type) {
            case verbs::kEventPortActive:
                port_news_.clear();
                break;
            case verbs::kEventPortError:
            case verbs::kEventGidChange:
                port_news_ = "; the device reported: " + name;
                break;
            case verbs::kEventCqError:
            case verbs::kEventQpFatal:
            case verbs::kEventQpRequestError:
            case verbs::kEventQpAccessError:
            case verbs::kEventDeviceFatal:
                throw RdmaError(text() + " failed; the device reported: " + name,
                                "see the kernel's log (dmesg)");
            default:
                break;
        }
    }
}

void QueuePair::throw_failed(const verbs::WorkCompletion& completion,
                             const std::string& what) const {
    char vendor_error[16];
    std::snprintf(vendor_error, sizeof(vendor_error), "0x%x", completion.vendor_error);
    std::string remedy;
    if (completion.status == verbs::kRetryExceeded) {
        remedy = "the process at the other end, its host or the network between them is gone";
    } else if (completion.status == verbs::kRnrRetryExceeded) {
        remedy = "this is a bug in megatron_ext, please report it";
    }
    throw RdmaError(what + " failed: " + library_.wc_status_str(completion.status) + " (status " +
                        std::to_string(completion.status) + ", vendor error " + vendor_error +
                        ") on " + text() + port_news_,
                    remedy);
}

std::string QueuePair::text() const {
    std::string result = "RDMA queue pair " + std::to_string(number());
    if (source_) {
        result += " of " + source_->text();
    }
    if (target_) {
        result += " to " + std::to_string(target_->qp_number) + " at " + target_->gid.text();
        if (source_ && source_->link_layer != verbs::kEthernet) {
            result += " LID " + std::to_string(target_->lid);
        }
    }
    return result;
}

}  // namespace megatron_ext
