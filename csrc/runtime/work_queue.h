// Assigns tasks to workers. Plain C++ without Python, so that a thread sanitizer covers all of it.
//
// Tasks are numbers. Workers take tasks of one batch at a time; other batches wait for their turn.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace esper::runtime {

using Milliseconds = std::chrono::milliseconds;

// Tasks that are run together; a derived class holds the work and the results.
class Batch {
 public:
    // Runs tasks in order of descending cost, equal costs in the order given. Costs may be infinite, but not NaN.
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

// Whether a batch may begin; kNever once the queue is closed.
enum class Turn { kNow, kLater, kNever };

struct Job {
    std::shared_ptr<Batch> batch;
    size_t task = 0;
};

class WorkQueue {
 public:
    // --- for callers that bring a batch; none waits longer than `patience`

    // Waits for the batch's turn. When it comes, the batch begins and `cancelled` is cleared.
    Turn begin(const std::shared_ptr<Batch>& batch, Milliseconds patience);
    // Waits until all tasks of the batch, apart from those that were cancelled, are finished; returns whether they are.
    bool wait(const Batch& batch, Milliseconds patience);
    // Cancels the batch if it is still the current one.
    void cancel(const Batch& batch);
    // Gives up waiting for the batch: its last worker cleans it up. Returns false if it is finished already.
    bool abandon(Batch& batch);

    // --- for workers

    // Waits for a task; returns a job without a batch once the queue is closed.
    Job take();
    // Marks the task as finished. Returns true if it was the last one of an abandoned batch, which the worker cleans
    // up.
    bool finish(const Job& job);

    // --- for any thread

    // Starts no further task of the current batch.
    void cancel();
    bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
    // Cancels, and ends all workers.
    void close();
    bool closed() const { return closed_.load(std::memory_order_relaxed); }

 private:
    void drop_rest();  // call both with mutex_ held
    bool settle();

    std::mutex mutex_;
    std::condition_variable work_, turn_, done_;
    std::shared_ptr<Batch> current_;
    std::atomic<bool> cancelled_{false};
    std::atomic<bool> closed_{false};
};

}  // namespace esper::runtime
