// Assigns tasks to workers. Plain C++ without Python, so that a thread sanitizer covers all of it.
//
// Tasks are numbers. Workers take tasks of one batch at a time; other batches wait for their turn.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

namespace esper::runtime {

// Tasks that are run together; a derived class holds the work and the results.
class Batch {
 public:
    // Runs tasks in order of descending cost, equal costs in the order given. Costs may be infinite, but not NaN.
    explicit Batch(const std::vector<double>& costs) : order_(costs.size()), started_(costs.size(), 0) {
        std::iota(order_.begin(), order_.end(), size_t{0});
        std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
    }
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
    // --- for callers with a batch; none waits longer than `patience`

    // Waits for the batch's turn. When it comes, the batch begins and `cancelled` is cleared.
    Turn begin(const std::shared_ptr<Batch>& batch, std::chrono::milliseconds patience) {
        std::unique_lock lock(mutex_);
        if (!turn_.wait_for(lock, patience, [&] { return closed() || !current_; })) return Turn::kLater;
        if (closed()) return Turn::kNever;
        cancelled_ = false;
        if (!batch->finished()) {
            current_ = batch;
            work_.notify_all();
        }
        return Turn::kNow;
    }
    // Waits until all tasks of the batch, apart from those that were cancelled, are finished; returns whether they are.
    bool wait(const Batch& batch, std::chrono::milliseconds patience) {
        std::unique_lock lock(mutex_);
        return done_.wait_for(lock, patience, [&] { return batch.finished(); });
    }
    // Cancels the batch if it is still the current one.
    void cancel(const Batch& batch) {
        const std::lock_guard lock(mutex_);
        if (current_.get() != &batch) return;
        cancelled_ = true;
        drop_rest();
    }
    // Gives up waiting for the batch: its last worker cleans it up. Returns false if it is finished already.
    bool abandon(Batch& batch) {
        const std::lock_guard lock(mutex_);
        if (current_.get() == &batch) drop_rest();
        batch.abandoned_ = !batch.finished();
        return batch.abandoned_;
    }

    // --- for workers

    // Waits for a task; returns a job without a batch once the queue is closed.
    Job take() {
        std::unique_lock lock(mutex_);
        work_.wait(lock, [&] { return closed() || (current_ && current_->next_ < current_->order_.size()); });
        if (closed()) return {};
        const size_t task = current_->order_[current_->next_++];
        current_->started_[task] = 1;
        ++current_->running_;
        return {current_, task};
    }
    // Marks the task as finished. Returns true if it was the last of an abandoned batch, which the worker cleans up.
    bool finish(const Job& job) {
        const std::lock_guard lock(mutex_);
        --job.batch->running_;
        return settle();
    }

    // --- for any thread

    // Starts no further task of the current batch.
    void cancel() {
        const std::lock_guard lock(mutex_);
        cancelled_ = true;
        drop_rest();
    }
    bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
    const std::atomic<bool>* cancelled_flag() const { return &cancelled_; }
    // Cancels, and ends all workers.
    void close() {
        const std::lock_guard lock(mutex_);
        cancelled_ = true;
        closed_ = true;
        drop_rest();
        work_.notify_all();
        turn_.notify_all();
    }
    bool closed() const { return closed_.load(std::memory_order_relaxed); }

 private:
    // Call this and the next with mutex_ held.
    void drop_rest() {
        if (!current_) return;
        current_->next_ = current_->order_.size();
        settle();
    }
    // Makes room for the next batch if the current one is finished. Returns whether that one was abandoned.
    bool settle() {
        if (!current_ || !current_->finished()) return false;
        const bool abandoned = current_->abandoned_;
        current_.reset();
        done_.notify_all();
        turn_.notify_all();
        return abandoned;
    }

    std::mutex mutex_;
    std::condition_variable work_, turn_, done_;
    std::shared_ptr<Batch> current_;
    std::atomic<bool> cancelled_{false};
    std::atomic<bool> closed_{false};
};

}  // namespace esper::runtime
