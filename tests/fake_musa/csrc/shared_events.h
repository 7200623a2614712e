// Interprocess events for waits of streams: two counters and a time in shared memory.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "queues.h"
#include "standstill.h"

namespace fake_musa {

class SharedEvents {
  public:
    static SharedEvents& instance() {
        static SharedEvents* const events = new SharedEvents;
        return *events;
    }

    int64_t open(int64_t file, int64_t pid) {
        void* const data =
            mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, static_cast<int>(file), 0);
        TORCH_CHECK(data != MAP_FAILED, "MUSA error: invalid resource handle");
        auto words = std::shared_ptr<Words>(static_cast<Words*>(data),
                                            [](Words* gone) { munmap(gone, kBytes); });
        const std::lock_guard<std::mutex> lock(mutex_);
        events_[++last_] = {std::move(words), pid};
        return last_;
    }

    void close(int64_t number) {
        const std::lock_guard<std::mutex> lock(mutex_);
        events_.erase(number);
    }

    void record(int64_t number, StreamKey stream) {
        const Event event = find(number);
        const int64_t count = ++event.words->recorded;
        Task task;
        task.name = "an event of several processes";
        task.run = [words = event.words, count, mark = Device::instance().record(stream)] {
            words->done_s = mark->time_s;
            words->done = count;
        };
        Device::instance().submit(stream, std::move(task));
    }

    // Makes a stream wait until the work recorded so far is complete.
    void wait(int64_t number, StreamKey stream) {
        const Event event = find(number);
        const int64_t count = event.words->recorded;
        Task task;
        task.kind = Kind::kPoll;
        task.name = "wait for an event of process " + std::to_string(event.pid);
        task.came_s = [event, count] {
            if (event.words->done >= count) {
                return event.words->done_s.load();
            }
            TORCH_CHECK(Standstill::lives(event.pid), "the process of an event is gone");
            return 0.0;
        };
        Device::instance().submit(stream, std::move(task));
    }

    bool query(int64_t number) {
        const Event event = find(number);
        return event.words->done >= event.words->recorded;
    }

  private:
    static constexpr size_t kBytes = 4096;
    struct Words {
        std::atomic<int64_t> recorded, done;
        std::atomic<double> done_s;  // by the clock of the queue that recorded it
    };
    struct Event {
        std::shared_ptr<Words> words;
        int64_t pid = 0;
    };

    Event find(int64_t number) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return events_.at(number);
    }

    std::mutex mutex_;
    std::map<int64_t, Event> events_;
    int64_t last_ = 0;
};

}  // namespace fake_musa
