#include "work_queue.h"

#include <algorithm>
#include <numeric>

namespace esper::runtime {

Batch::Batch(const std::vector<double>& costs) : order_(costs.size()), started_(costs.size(), 0) {
    std::iota(order_.begin(), order_.end(), size_t{0});
    std::stable_sort(order_.begin(), order_.end(), [&](size_t a, size_t b) { return costs[a] > costs[b]; });
}

Turn WorkQueue::begin(const std::shared_ptr<Batch>& batch, Milliseconds patience) {
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

bool WorkQueue::wait(const Batch& batch, Milliseconds patience) {
    std::unique_lock lock(mutex_);
    return done_.wait_for(lock, patience, [&] { return batch.finished(); });
}

void WorkQueue::cancel(const Batch& batch) {
    const std::lock_guard lock(mutex_);
    if (current_.get() != &batch) return;
    cancelled_ = true;
    drop_rest();
}

bool WorkQueue::abandon(Batch& batch) {
    const std::lock_guard lock(mutex_);
    if (current_.get() == &batch) drop_rest();
    batch.abandoned_ = !batch.finished();
    return batch.abandoned_;
}

Job WorkQueue::take() {
    std::unique_lock lock(mutex_);
    work_.wait(lock, [&] { return closed() || (current_ && current_->next_ < current_->order_.size()); });
    if (closed()) return {};
    const size_t task = current_->order_[current_->next_++];
    current_->started_[task] = 1;
    ++current_->running_;
    return {current_, task};
}

bool WorkQueue::finish(const Job& job) {
    const std::lock_guard lock(mutex_);
    --job.batch->running_;
    return settle();
}

void WorkQueue::cancel() {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    drop_rest();
}

void WorkQueue::close() {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    closed_ = true;
    drop_rest();
    work_.notify_all();
    turn_.notify_all();
}

void WorkQueue::drop_rest() {
    if (!current_) return;
    current_->next_ = current_->order_.size();
    settle();
}

// Makes room for the next batch if the current one is finished. Returns whether that one was abandoned.
bool WorkQueue::settle() {
    if (!current_ || !current_->finished()) return false;
    const bool abandoned = current_->abandoned_;
    current_.reset();
    done_.notify_all();
    turn_.notify_all();
    return abandoned;
}

}  // namespace esper::runtime
