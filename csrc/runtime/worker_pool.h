// Persistent threads that run Python callables, each on a physical core of its own.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

namespace esper::host {

// What the threads of a pool share with it. They do not own the pool, so a forgotten one can go.
struct PoolState;

class WorkerPool {
 public:
    // `count` 0 is one worker for each physical core. `start(worker)` is called once on each thread; what it raises,
    // this raises. `pin` keeps each worker on a core of its own if there are enough of them.
    WorkerPool(int count, pybind11::object start, bool pin, const std::string& name);
    // Sends the workers home and does not wait for them: the collector of garbage must never be made to wait.
    ~WorkerPool();
    WorkerPool(const WorkerPool&) = delete;
    WorkerPool& operator=(const WorkerPool&) = delete;

    // (exception or None, seconds) of each task, in the order given.
    pybind11::list run(const std::vector<pybind11::object>& tasks, const std::vector<double>& costs);
    void cancel();
    bool cancelled() const;
    void close();
    bool closed() const;
    size_t count() const;
    // The CPUs that each worker stays on; empty for one that the system places.
    std::vector<std::vector<int>> cpus() const;

 private:
    void start_threads(const std::string& name, const pybind11::object& start);
    void refuse_other_processes() const;

    std::shared_ptr<PoolState> state_;
    pybind11::list threads_;
};

void bind_worker_pool(pybind11::module_& m);

}  // namespace esper::host
