// The asynchronous device: hardware queues, each with a worker thread, and the streams that share
// them.
//
// A stream belongs to one queue, so its tasks keep their order. The first task of a queue blocks
// all tasks behind it, of any stream: a kernel until it has run, a wait until its event has
// occurred, an operation of a communicator until it has completed on this rank. This is the
// strictest reading of CUDA's guarantees: a blocked stream may block every other stream.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "host.h"
#include "mode.h"
#include "task_run.h"
#include "tasks.h"

namespace fake_musa {

class Device {
  public:
    // Never destroyed: its threads run until the process exits.
    static Device& instance() {
        static Device* const device = new Device;
        return *device;
    }

    int64_t new_stream(int device, int priority = 0) {
        const std::lock_guard<std::mutex> lock(mutex_);
        stream(stream_key(device, 0), device);  // the default stream uses the first queue
        const int64_t id = ++last_stream_;
        stream(stream_key(device, id), device).priority = priority;
        processors_[device].add_stream(priority);
        return id;
    }

    void submit(StreamKey key, Task task) {
        const std::lock_guard<std::mutex> lock(mutex_);
        push(key, std::move(task));
    }

    MarkPtr record(StreamKey key) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return push_mark(key);
    }

    void wait(StreamKey key, const MarkPtr& mark) {
        if (mark == nullptr) {
            return;  // an event that was never recorded
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        Task task;
        task.kind = Kind::kWait;
        task.mark = mark;
        task.name = "wait for " + mark->where;
        push(key, std::move(task));
    }

    bool has_passed(const MarkPtr& mark) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return mark == nullptr || mark->done;
    }

    bool query(const MarkPtr& mark) {
        const std::lock_guard<std::mutex> lock(mutex_);
        failure_.check();
        return mark == nullptr || mark->done;
    }

    // Makes the host wait for a mark, and counts the wait. Returns false at the time-out.
    bool host_wait(const MarkPtr& mark, const char* what, double timeout_s = 1e9) {
        tell_host_wait(what);
        return quiet_wait(mark, timeout_s);
    }

    bool quiet_wait(const MarkPtr& mark, double timeout_s = 1e9) {
        if (mark == nullptr) {
            return true;
        }
        const ReleaseGil release;
        const double deadline_s = now_s() + timeout_s;
        std::unique_lock<std::mutex> lock(mutex_);
        host_state_ = "waits for " + mark->where;
        Processor& processor = *streams_.at(mark->stream).queue->processor;
        processor.begin_wait(mark->stream, now_s());
        while (!mark->done && !failure_.is_set() && now_s() < deadline_s) {
            const double left_s = std::max(0.0, deadline_s - now_s());
            mark->passed.wait_for(lock, std::chrono::duration<double>(std::min(left_s, 0.2)));
        }
        processor.end_wait(mark->stream);
        host_state_.clear();
        failure_.check();
        return mark->done;
    }

    void synchronize(const char* what) {
        tell_host_wait(what);
        quiet_synchronize();
    }

    void quiet_synchronize() {
        std::vector<MarkPtr> marks;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (const auto& [key, stream] : streams_) {
                marks.push_back(push_mark(key));
            }
        }
        for (const MarkPtr& mark : marks) {
            quiet_wait(mark);
        }
    }

    // -- operations of communicators -------------------------------------------------------

    int64_t new_message(StreamKey key, const std::string& name) {
        const std::lock_guard<std::mutex> lock(mutex_);
        auto message = std::make_shared<Message>();
        message->name = name;
        messages_[++last_message_] = message;
        Task task;
        task.kind = Kind::kMessage;
        task.name = name;
        task.message = std::move(message);
        task.lasts_us = Costs::instance().message_us;
        push(key, std::move(task));
        return last_message_;
    }

    // Waits until the operation is the first of its queue; returns when it became that.
    double await_turn(int64_t number) {
        const ReleaseGil release;
        std::unique_lock<std::mutex> lock(mutex_);
        const std::shared_ptr<Message> message = messages_.at(number);
        message->changed.wait(lock, [&] { return message->turn; });
        return message->turn_s;
    }

    // Ends an operation that all its ranks had come to at `end_s`.
    void end_message(int64_t number, double end_s, const std::string& error) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const std::shared_ptr<Message> message = messages_.at(number);
        messages_.erase(number);
        if (!error.empty()) {
            failure_.set(message->name + ": " + error);
        }
        message->end_s = end_s;
        message->done = true;
        message->changed.notify_all();
    }

    // -- introspection ---------------------------------------------------------------------

    // Number of tasks enqueued plus completed; it grows with any progress.
    int64_t progress() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return submitted_ + ended_;
    }

    bool runs() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return std::any_of(queues_.begin(), queues_.end(), [](const auto& entry) {
            return entry.second->computes;
        });
    }

    // Whether tasks are queued or the host waits.
    bool has_work() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return !host_state_.empty() ||
               std::any_of(queues_.begin(), queues_.end(),
                           [](const auto& entry) { return !entry.second->tasks.empty(); });
    }

    // The first task of each queue, and the number of tasks behind it.
    std::string heads() {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::string text;
        if (!host_state_.empty()) {
            text += "  the host " + host_state_ + "\n";
        }
        for (const auto& [place, queue] : queues_) {
            if (queue->tasks.empty()) {
                continue;
            }
            const Task& head = queue->tasks.front();
            text += "  queue " + std::to_string(place.second) + ": " + head.name + " in " +
                    name_of(head.stream) + "; behind it " +
                    std::to_string(queue->tasks.size() - 1);
            if (queue->tasks.size() > 1) {
                text += ", first " + queue->tasks[1].name;
            }
            text += "\n";
        }
        return text;
    }

    // Sets what the host waits for outside of this device; empty: nothing.
    void set_host_state(const std::string& text) {
        const std::lock_guard<std::mutex> lock(mutex_);
        host_state_ = text;
    }

    // Stops the device with an error: no task runs any more, and every wait of the host raises it.
    void give_up(const std::string& text) {
        const std::lock_guard<std::mutex> lock(mutex_);
        failure_.set(text);
    }

    static std::string name_of(StreamKey key) {
        return key < 0 ? "the default stream" : "stream " + std::to_string(key);
    }

    // Callback of the first queue's creation, called once by the creating thread.
    static std::function<void()>& at_start() {
        static std::function<void()> function;
        return function;
    }

  private:
    struct Stream {
        Queue* queue = nullptr;
        int64_t submitted = 0;
        int priority = 0;
    };

    Device() = default;

    Stream& stream(StreamKey key, int device) {
        Stream& found = streams_[key];
        if (found.queue == nullptr) {
            const int index = num_streams_[device]++ % num_hardware_queues();
            found.queue = &queue(device, index);
        }
        return found;
    }

    Queue& queue(int device, int index) {
        auto& found = queues_[{device, index}];
        if (found == nullptr) {
            found = std::make_unique<Queue>();
            found->processor = &processors_[device];
            const char* const rank = std::getenv("RANK");
            const int64_t number = rank == nullptr ? 0 : std::atoi(rank);
            found->random.seed(
                static_cast<uint64_t>((Costs::instance().seed * 64 + number) * 64 + index));
            if (queues_.size() == 1 && at_start()) {
                at_start()();
            }
            std::thread([this, queue = found.get()] { work(*queue); }).detach();
        }
        return *found;
    }

    void push(StreamKey key, Task task) {
        if (key < 0) {
            stream(key, static_cast<int>(-key - 1));
        }
        Stream& target = streams_.at(key);
        task.stream = key;
        task.priority = target.priority;
        task.given_s = now_s();
        ++target.submitted;
        ++submitted_;
        target.queue->tasks.push_back(std::move(task));
        if (target.queue->tasks.size() == 1) {
            target.queue->filled.notify_one();
        }
    }

    MarkPtr push_mark(StreamKey key) {
        auto mark = std::make_shared<Mark>();
        mark->where = name_of(key);
        mark->stream = key;
        if (key >= 0 || streams_.count(key) != 0) {
            mark->where += " after task " + std::to_string(streams_.at(key).submitted);
        }
        Task task;
        task.kind = Kind::kRecord;
        task.name = "an event";
        task.mark = mark;
        push(key, std::move(task));
        return mark;
    }

    void work(Queue& queue) {
        for (;;) {
            Task ended;  // destroyed without the lock
            std::unique_lock<std::mutex> lock(mutex_);
            queue.filled.wait(lock, [&] { return !queue.tasks.empty(); });
            // The task stays valid: a push does not move the elements of a deque.
            TaskRun(queue, queue.tasks.front(), lock, failure_).carry_out();
            ended = std::move(queue.tasks.front());
            queue.tasks.pop_front();
            ++ended_;
            if (ended.kind == Kind::kRecord) {
                ended.mark->done = true;
                ended.mark->time_s = queue.clock_s;
                ended.mark->passed.notify_all();
            }
        }
    }

    std::mutex mutex_;
    std::map<std::pair<int, int>, std::unique_ptr<Queue>> queues_;  // by device and index
    std::map<StreamKey, Stream> streams_;
    std::map<int, Processor> processors_;  // by device
    std::map<int, int> num_streams_;
    std::map<int64_t, std::shared_ptr<Message>> messages_;
    int64_t last_stream_ = 0, last_message_ = 0, submitted_ = 0, ended_ = 0;
    Failure failure_;
    std::string host_state_;
};

}  // namespace fake_musa
