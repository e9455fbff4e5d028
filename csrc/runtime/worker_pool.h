// Persistent threads that run Python callables, each on a physical core of its own.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

namespace esper::runtime {

// State shared by a pool and its threads. Threads do not own the pool, so an unused pool can be destroyed.
struct PoolState;

class WorkerPool {
 public:
    // `count` 0 means one worker per physical core. `start(worker)` is called once on each thread; the constructor
    // raises its exceptions. `pin` gives each worker a core of its own if there are enough cores.
    WorkerPool(int count, pybind11::object start, bool pin, const std::string& name);
    // Ends the workers without waiting for them: the garbage collector must not block.
    ~WorkerPool();
    WorkerPool(const WorkerPool&) = delete;
    WorkerPool& operator=(const WorkerPool&) = delete;

    // Returns (exception or None, seconds) for each task, in the order given.
    pybind11::list run(const std::vector<pybind11::object>& tasks, const std::vector<double>& costs);
    void cancel();
    bool cancelled() const;
    void close();
    bool closed() const;
    size_t count() const;
    // The CPUs that each worker is pinned to; empty for a worker that the system places.
    std::vector<std::vector<int>> cpus() const;

 private:
    void start_threads(const std::string& name, const pybind11::object& start);
    void refuse_other_processes() const;

    std::shared_ptr<PoolState> state_;
    pybind11::list threads_;
};

void bind_worker_pool(pybind11::module_& m);

}  // namespace esper::runtime
