#include "rdma/probe.h"

#include "core/segment.h"
#include "rdma/choice.h"
#include "rdma/devices.h"
#include "rdma/errors.h"
#include "rdma/library.h"
#include "rdma/queue_pair.h"
#include "rdma/settings.h"

namespace megatron_ext {
namespace {

constexpr std::size_t kTrialBytes = std::size_t{1} << 20;

std::string describe(const std::vector<RdmaDevice>& devices) {
    std::string text;
    for (const RdmaDevice& device : devices) {
        text += (text.empty() ? "" : ", ") + device.name;
        for (const RdmaPort& port : device.ports) {
            text += " (port " + std::to_string(port.number) + " " + port.state_name() + ", " +
                    port.link_layer_name() + ")";
        }
    }
    return text.empty() ? "none" : text;
}

RdmaTarget itself(const QueuePair& queue_pair, const RdmaSource& source) {
    return {queue_pair.number(), queue_pair.first_psn(), source.gid, source.lid, source.mtu};
}

/// Collects the findings. An exception belongs to the last step that was started.
class Steps {
  public:
    void begin(const char* step) { step_ = step; }
    void good(const std::string& text) { findings_.push_back({step_, true, text, ""}); }
    void bad(const RdmaError& error) {
        findings_.push_back({step_, false, error.finding(), error.remedy()});
    }
    std::vector<RdmaFinding> take() { return std::move(findings_); }

  private:
    std::string step_;
    std::vector<RdmaFinding> findings_;
};

void run(Steps& steps, const RdmaSettings& settings, const std::string& address,
         const std::string& sysfs) {
    steps.begin("library");
    steps.good(verbs::load_library().path);

    steps.begin("devices");
    const std::vector<RdmaDevice> devices = list_devices(sysfs);
    if (devices.empty()) {
        choose_sources(devices, settings, address, 0, sysfs);
    }
    steps.good(describe(devices));

    steps.begin("port");
    const RdmaSource source = choose_sources(devices, settings, address, 0, sysfs).front();
    steps.good(source.text() + ", MTU " + std::to_string(mtu_bytes(source.mtu)));

    steps.begin("memory");
    QueuePair queue_pair(source.device, {4, 4});
    Segment segment = Segment::create(kTrialBytes);
    const RegisteredMemory memory =
        queue_pair.register_memory(segment.data(), segment.size_bytes());
    steps.good(std::to_string(kTrialBytes) + " bytes registered");

    steps.begin("queue pair");
    queue_pair.begin(source);
    queue_pair.connect(itself(queue_pair, source), settings);
    steps.good("number " + std::to_string(queue_pair.number()) + " connected to itself");
}

}  // namespace

std::vector<RdmaFinding> probe_rdma(const std::string& address, const std::string& sysfs) {
    const RdmaSettings settings = RdmaSettings::from_environment();
    Steps steps;
    try {
        run(steps, settings, address, sysfs);
    } catch (const RdmaError& error) {
        steps.bad(error);
    }
    return steps.take();
}

}  // namespace megatron_ext
