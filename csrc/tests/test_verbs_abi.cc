// Compares verbs_abi.h with the system's header of libibverbs at compile time, if the build found
// rdma-core's headers (Debian: libibverbs-dev).

#include "rdma/verbs_abi.h"

#include "check.h"

#if __has_include(<infiniband/verbs.h>)
#include <infiniband/verbs.h>

namespace ours = megatron_ext::verbs;

#define SAME_SIZE(type, system) static_assert(sizeof(ours::type) == sizeof(system))
#define SAME_FIELD(type, field, system, system_field)                             \
    static_assert(offsetof(ours::type, field) == offsetof(system, system_field)); \
    static_assert(sizeof(ours::type::field) == sizeof(system::system_field))
#define SAME_VALUE(value, system) \
    static_assert(static_cast<long>(ours::value) == static_cast<long>(system))

SAME_SIZE(Gid, ibv_gid);

SAME_SIZE(PortAttr, ibv_port_attr);
SAME_FIELD(PortAttr, state, ibv_port_attr, state);
SAME_FIELD(PortAttr, active_mtu, ibv_port_attr, active_mtu);
SAME_FIELD(PortAttr, gid_table_length, ibv_port_attr, gid_tbl_len);
SAME_FIELD(PortAttr, max_message_bytes, ibv_port_attr, max_msg_sz);
SAME_FIELD(PortAttr, lid, ibv_port_attr, lid);
SAME_FIELD(PortAttr, link_layer, ibv_port_attr, link_layer);

SAME_SIZE(ProtectionDomain, ibv_pd);
SAME_SIZE(MemoryRegion, ibv_mr);
SAME_FIELD(MemoryRegion, lkey, ibv_mr, lkey);
SAME_FIELD(MemoryRegion, rkey, ibv_mr, rkey);
SAME_SIZE(CompletionChannel, ibv_comp_channel);
SAME_FIELD(CompletionChannel, fd, ibv_comp_channel, fd);
SAME_SIZE(CompletionQueue, ibv_cq);
SAME_FIELD(CompletionQueue, context, ibv_cq, context);
SAME_SIZE(QueuePair, ibv_qp);
SAME_FIELD(QueuePair, context, ibv_qp, context);
SAME_FIELD(QueuePair, number, ibv_qp, qp_num);

SAME_SIZE(QpCapacity, ibv_qp_cap);
SAME_FIELD(QpCapacity, max_inline_bytes, ibv_qp_cap, max_inline_data);
SAME_SIZE(QpInitAttr, ibv_qp_init_attr);
SAME_FIELD(QpInitAttr, capacity, ibv_qp_init_attr, cap);
SAME_FIELD(QpInitAttr, type, ibv_qp_init_attr, qp_type);
SAME_FIELD(QpInitAttr, signal_all, ibv_qp_init_attr, sq_sig_all);

SAME_SIZE(GlobalRoute, ibv_global_route);
SAME_FIELD(GlobalRoute, source_index, ibv_global_route, sgid_index);
SAME_FIELD(GlobalRoute, hop_limit, ibv_global_route, hop_limit);
SAME_FIELD(GlobalRoute, traffic_class, ibv_global_route, traffic_class);
SAME_SIZE(AddressHandleAttr, ibv_ah_attr);
SAME_FIELD(AddressHandleAttr, dest_lid, ibv_ah_attr, dlid);
SAME_FIELD(AddressHandleAttr, service_level, ibv_ah_attr, sl);
SAME_FIELD(AddressHandleAttr, is_global, ibv_ah_attr, is_global);
SAME_FIELD(AddressHandleAttr, port, ibv_ah_attr, port_num);
SAME_SIZE(QpAttr, ibv_qp_attr);
SAME_FIELD(QpAttr, path_mtu, ibv_qp_attr, path_mtu);
SAME_FIELD(QpAttr, receive_psn, ibv_qp_attr, rq_psn);
SAME_FIELD(QpAttr, send_psn, ibv_qp_attr, sq_psn);
SAME_FIELD(QpAttr, dest_qp_number, ibv_qp_attr, dest_qp_num);
SAME_FIELD(QpAttr, access_flags, ibv_qp_attr, qp_access_flags);
SAME_FIELD(QpAttr, address, ibv_qp_attr, ah_attr);
SAME_FIELD(QpAttr, max_read_atomic, ibv_qp_attr, max_rd_atomic);
SAME_FIELD(QpAttr, max_dest_read_atomic, ibv_qp_attr, max_dest_rd_atomic);
SAME_FIELD(QpAttr, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME_FIELD(QpAttr, port, ibv_qp_attr, port_num);
SAME_FIELD(QpAttr, timeout, ibv_qp_attr, timeout);
SAME_FIELD(QpAttr, retry_count, ibv_qp_attr, retry_cnt);
SAME_FIELD(QpAttr, rnr_retry, ibv_qp_attr, rnr_retry);

SAME_SIZE(MemoryPiece, ibv_sge);
SAME_SIZE(SendRequest, ibv_send_wr);
SAME_FIELD(SendRequest, pieces, ibv_send_wr, sg_list);
SAME_FIELD(SendRequest, opcode, ibv_send_wr, opcode);
SAME_FIELD(SendRequest, flags, ibv_send_wr, send_flags);
SAME_FIELD(SendRequest, immediate, ibv_send_wr, imm_data);
SAME_FIELD(SendRequest, remote_address, ibv_send_wr, wr.rdma.remote_addr);
SAME_FIELD(SendRequest, rkey, ibv_send_wr, wr.rdma.rkey);
SAME_SIZE(ReceiveRequest, ibv_recv_wr);
SAME_FIELD(ReceiveRequest, num_pieces, ibv_recv_wr, num_sge);
SAME_SIZE(WorkCompletion, ibv_wc);
SAME_FIELD(WorkCompletion, status, ibv_wc, status);
SAME_FIELD(WorkCompletion, opcode, ibv_wc, opcode);
SAME_FIELD(WorkCompletion, vendor_error, ibv_wc, vendor_err);
SAME_FIELD(WorkCompletion, num_bytes, ibv_wc, byte_len);
SAME_FIELD(WorkCompletion, immediate, ibv_wc, imm_data);
SAME_FIELD(WorkCompletion, qp_number, ibv_wc, qp_num);
SAME_SIZE(AsyncEvent, ibv_async_event);
SAME_FIELD(AsyncEvent, type, ibv_async_event, event_type);

SAME_SIZE(ContextOps, ibv_context_ops);
SAME_FIELD(ContextOps, poll_cq, ibv_context_ops, poll_cq);
SAME_FIELD(ContextOps, request_notify, ibv_context_ops, req_notify_cq);
SAME_FIELD(ContextOps, post_send, ibv_context_ops, post_send);
SAME_FIELD(ContextOps, post_receive, ibv_context_ops, post_recv);
SAME_SIZE(Context, ibv_context);
SAME_FIELD(Context, ops, ibv_context, ops);
SAME_FIELD(Context, async_fd, ibv_context, async_fd);

SAME_VALUE(kPortDown, IBV_PORT_DOWN);
SAME_VALUE(kPortInit, IBV_PORT_INIT);
SAME_VALUE(kPortArmed, IBV_PORT_ARMED);
SAME_VALUE(kPortActive, IBV_PORT_ACTIVE);
SAME_VALUE(kInfiniBand, IBV_LINK_LAYER_INFINIBAND);
SAME_VALUE(kEthernet, IBV_LINK_LAYER_ETHERNET);
SAME_VALUE(kReset, IBV_QPS_RESET);
SAME_VALUE(kInit, IBV_QPS_INIT);
SAME_VALUE(kReadyToReceive, IBV_QPS_RTR);
SAME_VALUE(kReadyToSend, IBV_QPS_RTS);
SAME_VALUE(kError, IBV_QPS_ERR);
SAME_VALUE(kReliableConnection, IBV_QPT_RC);
SAME_VALUE(kAttrState, IBV_QP_STATE);
SAME_VALUE(kAttrAccessFlags, IBV_QP_ACCESS_FLAGS);
SAME_VALUE(kAttrPkeyIndex, IBV_QP_PKEY_INDEX);
SAME_VALUE(kAttrPort, IBV_QP_PORT);
SAME_VALUE(kAttrAddress, IBV_QP_AV);
SAME_VALUE(kAttrPathMtu, IBV_QP_PATH_MTU);
SAME_VALUE(kAttrTimeout, IBV_QP_TIMEOUT);
SAME_VALUE(kAttrRetryCount, IBV_QP_RETRY_CNT);
SAME_VALUE(kAttrRnrRetry, IBV_QP_RNR_RETRY);
SAME_VALUE(kAttrReceivePsn, IBV_QP_RQ_PSN);
SAME_VALUE(kAttrMaxReadAtomic, IBV_QP_MAX_QP_RD_ATOMIC);
SAME_VALUE(kAttrMinRnrTimer, IBV_QP_MIN_RNR_TIMER);
SAME_VALUE(kAttrSendPsn, IBV_QP_SQ_PSN);
SAME_VALUE(kAttrMaxDestReadAtomic, IBV_QP_MAX_DEST_RD_ATOMIC);
SAME_VALUE(kAttrDestQpNumber, IBV_QP_DEST_QPN);
SAME_VALUE(kLocalWrite, IBV_ACCESS_LOCAL_WRITE);
SAME_VALUE(kRemoteWrite, IBV_ACCESS_REMOTE_WRITE);
SAME_VALUE(kEventCqError, IBV_EVENT_CQ_ERR);
SAME_VALUE(kEventQpFatal, IBV_EVENT_QP_FATAL);
SAME_VALUE(kEventQpRequestError, IBV_EVENT_QP_REQ_ERR);
SAME_VALUE(kEventQpAccessError, IBV_EVENT_QP_ACCESS_ERR);
SAME_VALUE(kEventCommunicationEstablished, IBV_EVENT_COMM_EST);
SAME_VALUE(kEventDeviceFatal, IBV_EVENT_DEVICE_FATAL);
SAME_VALUE(kEventPortActive, IBV_EVENT_PORT_ACTIVE);
SAME_VALUE(kEventPortError, IBV_EVENT_PORT_ERR);
SAME_VALUE(kEventGidChange, IBV_EVENT_GID_CHANGE);
SAME_VALUE(kSuccess, IBV_WC_SUCCESS);
SAME_VALUE(kFlushed, IBV_WC_WR_FLUSH_ERR);
SAME_VALUE(kRetryExceeded, IBV_WC_RETRY_EXC_ERR);
SAME_VALUE(kRnrRetryExceeded, IBV_WC_RNR_RETRY_EXC_ERR);
SAME_VALUE(kWcRdmaWrite, IBV_WC_RDMA_WRITE);
SAME_VALUE(kWcReceive, IBV_WC_RECV);
SAME_VALUE(kWcReceiveWithImmediate, IBV_WC_RECV_RDMA_WITH_IMM);
SAME_VALUE(kRdmaWrite, IBV_WR_RDMA_WRITE);
SAME_VALUE(kRdmaWriteWithImmediate, IBV_WR_RDMA_WRITE_WITH_IMM);
SAME_VALUE(kSignaled, IBV_SEND_SIGNALED);

TEST(the_interface_is_that_of_the_installed_header) { std::puts("compared at compile time"); }

#else

TEST(the_interface_is_that_of_the_installed_header) {
    std::puts("SKIPPED: infiniband/verbs.h is not installed (Debian: libibverbs-dev)");
}

#endif
