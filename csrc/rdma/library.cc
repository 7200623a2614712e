#include "rdma/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "rdma/errors.h"

namespace megatron_ext::verbs {
namespace {

constexpr const char* kPathVariable = "MEGATRON_EXT_IBVERBS_LIB";
constexpr const char* kRemedy =
    "install it (Debian: apt-get install libibverbs1 ibverbs-providers) or name the file in "
    "MEGATRON_EXT_IBVERBS_LIB";

std::string last_dl_error() {
    const char* const text = ::dlerror();
    return text == nullptr ? "unknown error" : text;
}

/// Looks up a symbol of version IBVERBS_1.1. A name may have several versions, and dlsym() may
/// return the oldest one, which has a different interface. A library without versions, as in tests,
/// has plain names only.
template <typename Function>
void find(void* handle, const Library& library, const char* name, Function& function) {
    void* symbol = ::dlvsym(handle, name, "IBVERBS_1.1");
    if (symbol == nullptr) {
        symbol = ::dlsym(handle, name);
    }
    if (symbol == nullptr) {
        throw RdmaError(library.path + " has no function " + name, kRemedy);
    }
    function = reinterpret_cast<Function>(symbol);
}

void find_all(void* handle, Library& library) {
    find(handle, library, "ibv_fork_init", library.fork_init);
    find(handle, library, "ibv_get_device_list", library.get_device_list);
    find(handle, library, "ibv_free_device_list", library.free_device_list);
    find(handle, library, "ibv_get_device_name", library.get_device_name);
    find(handle, library, "ibv_open_device", library.open_device);
    find(handle, library, "ibv_close_device", library.close_device);
    find(handle, library, "ibv_query_port", library.query_port);
    find(handle, library, "ibv_query_gid", library.query_gid);
    find(handle, library, "ibv_alloc_pd", library.alloc_pd);
    find(handle, library, "ibv_dealloc_pd", library.dealloc_pd);
    find(handle, library, "ibv_reg_mr", library.reg_mr);
    find(handle, library, "ibv_dereg_mr", library.dereg_mr);
    find(handle, library, "ibv_create_comp_channel", library.create_comp_channel);
    find(handle, library, "ibv_destroy_comp_channel", library.destroy_comp_channel);
    find(handle, library, "ibv_create_cq", library.create_cq);
    find(handle, library, "ibv_destroy_cq", library.destroy_cq);
    find(handle, library, "ibv_get_cq_event", library.get_cq_event);
    find(handle, library, "ibv_ack_cq_events", library.ack_cq_events);
    find(handle, library, "ibv_create_qp", library.create_qp);
    find(handle, library, "ibv_modify_qp", library.modify_qp);
    find(handle, library, "ibv_destroy_qp", library.destroy_qp);
    find(handle, library, "ibv_get_async_event", library.get_async_event);
    find(handle, library, "ibv_ack_async_event", library.ack_async_event);
    find(handle, library, "ibv_wc_status_str", library.wc_status_str);
    find(handle, library, "ibv_event_type_str", library.event_type_str);
}

std::vector<std::string> candidate_paths() {
    const char* const path = std::getenv(kPathVariable);
    if (path != nullptr && *path != '\0') {
        return {path};
    }
    return {"libibverbs.so.1", "libibverbs.so"};
}

std::unique_ptr<Library> open_first(const std::vector<std::string>& paths) {
    std::string first_error;
    for (const std::string& path : paths) {
        void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            first_error = first_error.empty() ? last_dl_error() : first_error;
            continue;
        }
        auto library = std::make_unique<Library>();
        library->path = path;
        find_all(handle, *library);
        // Data loaders fork, and registered memory must stay with the parent. On a kernel that
        // guarantees this itself, the call does nothing.
        library->fork_init();
        return library;
    }
    throw RdmaError("libibverbs cannot be opened: " + first_error, kRemedy);
}

}  // namespace

const Library& load_library() {
    static std::mutex mutex;
    static std::map<std::string, std::unique_ptr<Library>> opened;
    const std::vector<std::string> paths = candidate_paths();
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Library>& library = opened[paths.front()];
    if (library == nullptr) {
        library = open_first(paths);
    }
    return *library;
}

}  // namespace megatron_ext::verbs
