// Which worker does which task, and when. Plain C++ without Python, so that a thread sanitizer can look at all of it.
//
// Tasks are numbers. A batch of them is worked on at a time; other batches wait for their turn.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace esper::host {

using Milliseconds = std::chrono::milliseconds;

// Tasks that are done together. What the tasks are and what came of them is in a class that derives from this one.
class Batch {
 public:
    // The longest first, and of equally long ones the first first. Costs may be infinite, but not NaN.
    explicit Batch(const std::vector<double>& costs);
    virtual ~Batch() = default;

    bool started(size_t task) const { return started_[task]; }

 private:
    friend class WorkQueue;

    bool finished() const { return next_ == order_.size() && running_ == 0; }

    std::vector<size_t> order_;
    std::vector<char> started_;
    size_t next_ = 0;
    size_t running_ = 0;
    bool abandoned_ = false;
};

// Whether a batch may begin; never, once the queue is closed.
enum class Turn { kNow, kLater, kNever };

struct Job {
    std::shared_ptr<Batch> batch;
    size_t task = 0;
};

class WorkQueue {
 public:
    // For those who bring work. Both wait no longer than `patience`.
    // begin: for the turn of `batch`; when it comes, the batch has begun and `cancelled` is cleared.
    Turn begin(const std::shared_ptr<Batch>& batch, Milliseconds patience);
    // wait: until all tasks of `batch` are done, those left out that a cancellation came before; whether they are.
    bool wait(const Batch& batch, Milliseconds patience);
    // cancel: as below, unless `batch` is done and another is at work.
    void cancel(const Batch& batch);
    // Nobody will wait for `batch` any more. False if it is done already.
    bool abandon(Batch& batch);

    // For workers. take: waits for a task; one without a batch when the queue is closed.
    Job take();
    // The task is done. True if that was the last one of an abandoned batch, which is the worker's to clear up.
    bool finish(const Job& job);

    // For everybody. No further task of the batch at work is begun.
    void cancel();
    bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
    // Cancel, and send the workers home for good.
    void close();
    bool closed() const { return closed_.load(std::memory_order_relaxed); }

 private:
    void drop_rest();  // mutex_ is held in both
    bool settle();

    std::mutex mutex_;
    std::condition_variable work_, turn_, done_;
    std::shared_ptr<Batch> current_;
    std::atomic<bool> cancelled_{false};
    std::atomic<bool> closed_{false};
};

}  // namespace esper::host
