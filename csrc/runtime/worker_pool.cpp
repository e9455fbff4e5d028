// Persistent threads that run Python callables, each on a physical core of its own.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpus.h"
#include "interpreter.h"
#include "work_queue.h"

namespace py = pybind11;

namespace esper::runtime {

namespace {

using Clock = std::chrono::steady_clock;

constexpr double kSecondsAtExit = 5;  // for running tasks to finish when Python ends

PyObject* cancelled_error = nullptr;  // this and the next live as long as the process
PyObject* all_threads = nullptr;      // a WeakSet

// Objects are plain pointers, released by clear() with the GIL held: a thread that is killed with the process must not
// touch them.
struct PythonBatch : Batch {
    PythonBatch(const std::vector<py::object>& given, const std::vector<double>& costs)
        : Batch(costs), errors(given.size(), nullptr), seconds(given.size(), 0) {
        for (const py::object& task : given) tasks.push_back(py::object(task).release().ptr());
    }

    void clear() {
        for (PyObject*& task : tasks) Py_CLEAR(task);
        for (PyObject*& error : errors) Py_CLEAR(error);
    }

    std::vector<PyObject*> tasks, errors;
    std::vector<double> seconds;
};

// State shared by a pool and its threads. Threads do not own the pool, so an unused pool can be destroyed.
struct PoolState {
    explicit PoolState(size_t count) : cpus(count) {}

    void arrive() {
        const std::lock_guard lock(mutex);
        ++arrived;
        arrival.notify_all();
    }
    bool wait_for_arrivals(size_t count) {
        std::unique_lock lock(mutex);
        return arrival.wait_for(lock, WithoutGil::kPatience, [&] { return arrived == count; });
    }
    // In a forked child the copy has no threads, and its locks may be held forever.
    bool from_another_process() const { return process != getpid(); }

    WorkQueue queue;
    const pid_t process = getpid();

    // Set by the pool and read by its workers before they arrive; guarded by the GIL.
    PyObject* start = nullptr;
    PyObject* start_error = nullptr;
    std::vector<std::vector<int>> cpus;  // a worker clears its row if it cannot be pinned

    std::mutex mutex;
    std::condition_variable arrival;
    size_t arrived = 0;
};

// The pool that this thread works for.
thread_local const PoolState* own_pool = nullptr;

using Shared = std::shared_ptr<PoolState>;

// All living pools, to be closed at exit; guarded by the GIL.
std::vector<std::weak_ptr<PoolState>>& all_pools() {
    static auto* const pools = new std::vector<std::weak_ptr<PoolState>>;
    return *pools;
}

Shared make_state(size_t count) {
    // In a forked child, destroying a condition variable would wait for threads that do not exist.
    return {new PoolState(count), [](PoolState* state) {
                if (!state->from_another_process()) delete state;
            }};
}

void begin_work(PoolState& state, long index) {
    own_pool = &state;
    auto& cpus = state.cpus[static_cast<size_t>(index)];
    if (!pin_to(cpus)) cpus.clear();
    PyObject* const start = state.start;
    if (start == nullptr || start == Py_None) return;
    Py_INCREF(start);
    PyObject* const result = PyObject_CallFunction(start, "l", index);
    Py_DECREF(start);
    if (result != nullptr) {
        Py_DECREF(result);
    } else if (PyObject* const error = take_exception(); state.start_error == nullptr) {
        state.start_error = error;
    } else {
        Py_DECREF(error);
    }
}

void do_task(PythonBatch& batch, size_t task) {
    const auto begin = Clock::now();
    PyObject* const callable = std::exchange(batch.tasks[task], nullptr);
    PyObject* const result = PyObject_CallNoArgs(callable);
    if (result == nullptr) batch.errors[task] = take_exception();
    Py_XDECREF(result);
    Py_DECREF(callable);
    batch.seconds[task] = std::chrono::duration<double>(Clock::now() - begin).count();
}

// Body of a worker: the target of a Python thread, so that it keeps one thread state, name and
// `threading.current_thread()`. `self` is a capsule that owns the state until this returns. Uses the plain Python C API
// without objects that have destructors: see enter_python.
PyObject* work(PyObject* self, PyObject* index) {
    auto& state = **static_cast<Shared*>(PyCapsule_GetPointer(self, nullptr));
    begin_work(state, PyLong_AsLong(index));
    state.arrive();
    PyThreadState* thread = PyEval_SaveThread();
    for (Job job = state.queue.take(); job.batch; job = state.queue.take()) {
        auto& batch = static_cast<PythonBatch&>(*job.batch);
        enter_python(thread);
        do_task(batch, job.task);
        thread = PyEval_SaveThread();
        if (state.queue.finish(job)) {
            enter_python(thread);
            batch.clear();
            thread = PyEval_SaveThread();
        }
    }
    enter_python(thread);
    Py_RETURN_NONE;
}

PyMethodDef work_definition = {"work", &work, METH_O, nullptr};

py::object target(const Shared& state) {
    const py::capsule holder(new Shared(state), [](void* shared) { delete static_cast<Shared*>(shared); });
    return py::reinterpret_steal<py::object>(PyCFunction_New(&work_definition, holder.ptr()));
}

// At exit: joins all workers, so that none takes the GIL afterwards. Running tasks get kSecondsAtExit to finish.
void close_all() {
    for (const auto& pool : all_pools()) {
        if (const Shared state = pool.lock(); state && !state->from_another_process()) state->queue.close();
    }
    const auto deadline = Clock::now() + std::chrono::duration<double>(kSecondsAtExit);
    for (const py::handle thread : py::list(py::reinterpret_borrow<py::object>(all_threads))) {
        const double left = std::chrono::duration<double>(deadline - Clock::now()).count();
        thread.attr("join")(std::max(0.0, left));
    }
}

void check_tasks(const std::vector<py::object>& tasks, const std::vector<double>& costs) {
    if (tasks.size() != costs.size()) {
        throw py::value_error("expected one cost per task, got " + std::to_string(tasks.size()) + " tasks and " +
                              std::to_string(costs.size()) + " costs");
    }
    for (size_t i = 0; i < tasks.size(); ++i) {
        if (PyCallable_Check(tasks[i].ptr()) == 0) {
            throw py::type_error("task " + std::to_string(i) +
                                 " is not callable: " + py::repr(tasks[i]).cast<std::string>());
        }
        if (std::isnan(costs[i])) throw py::value_error("the cost of task " + std::to_string(i) + " is NaN");
    }
}

py::list collect(PythonBatch& batch) {
    py::list results;
    for (size_t i = 0; i < batch.tasks.size(); ++i) {
        py::object outcome = py::none();
        if (!batch.started(i)) outcome = py::handle(cancelled_error)("cancelled before it started");
        if (batch.errors[i] != nullptr) outcome = py::reinterpret_borrow<py::object>(batch.errors[i]);
        results.append(py::make_tuple(outcome, batch.seconds[i]));
    }
    return results;
}

class WorkerPool {
 public:
    WorkerPool(int count, const py::object& start, bool pin, const std::string& name) {
        if (count < 0) {
            throw py::value_error("count must be 0 (one worker per physical core) or more, got " +
                                  std::to_string(count));
        }
        auto places = cores();
        const auto workers = static_cast<size_t>(count > 0 ? count : physical_cores());
        state_ = make_state(workers);
        if (pin && workers <= places.size()) {
            places.resize(workers);
            state_->cpus = std::move(places);
        }
        auto& pools = all_pools();
        pools.erase(std::remove_if(pools.begin(), pools.end(), [](const auto& pool) { return pool.expired(); }),
                    pools.end());
        pools.push_back(state_);
        try {
            start_threads(name, start);
        } catch (...) {
            state_->queue.close();
            Py_CLEAR(state_->start);
            throw;
        }
    }
    // Ends the workers without waiting for them: the garbage collector must not block.
    ~WorkerPool() {
        if (!state_->from_another_process()) state_->queue.close();
    }
    WorkerPool(const WorkerPool&) = delete;
    WorkerPool& operator=(const WorkerPool&) = delete;

    py::list run(const std::vector<py::object>& tasks, const std::vector<double>& costs) {
        refuse_other_processes();
        check_tasks(tasks, costs);
        if (own_pool == state_.get()) {
            throw std::runtime_error("a task must not call run() of its own pool: it would wait for itself");
        }
        const auto batch = std::make_shared<PythonBatch>(tasks, costs);
        Turn turn = Turn::kLater;
        bool abandoned = false;
        WithoutGil waiting;
        while (turn == Turn::kLater && waiting.interruptions() == 0) {
            turn = state_->queue.begin(batch, WithoutGil::kPatience);
        }
        while (turn == Turn::kNow && !abandoned && !state_->queue.wait(*batch, WithoutGil::kPatience)) {
            const int interruptions = waiting.interruptions();
            if (interruptions == 1) state_->queue.cancel(*batch);
            // A second Ctrl-C does not wait for running tasks.
            if (interruptions > 1) abandoned = state_->queue.abandon(*batch);
        }
        waiting.end();
        const py::list results = turn == Turn::kNow && !abandoned ? collect(*batch) : py::list();
        if (!abandoned) batch->clear();
        waiting.raise();
        if (turn == Turn::kNever) throw std::runtime_error("this worker pool is closed");
        return results;
    }
    void cancel() {
        refuse_other_processes();
        state_->queue.cancel();
    }
    bool cancelled() const { return state_->queue.cancelled(); }
    int64_t cancelled_address() const { return reinterpret_cast<int64_t>(state_->queue.cancelled_flag()); }
    void close() {
        if (state_->from_another_process()) return;
        if (own_pool == state_.get()) throw std::runtime_error("a task must not close its own pool");
        state_->queue.close();
        for (const py::handle thread : threads_) thread.attr("join")();
    }
    bool closed() const { return state_->queue.closed(); }
    size_t count() const { return state_->cpus.size(); }
    const std::vector<std::vector<int>>& cpus() const { return state_->cpus; }

 private:
    void start_threads(const std::string& name, const py::object& start) {
        const py::object make = py::module_::import("threading").attr("Thread");
        state_->start = py::object(start).release().ptr();
        for (size_t i = 0; i < count(); ++i) {
            const py::object thread = make(py::arg("target") = target(state_), py::arg("args") = py::make_tuple(i),
                                           py::arg("name") = name + "-" + std::to_string(i), py::arg("daemon") = true);
            thread.attr("start")();
            py::handle(all_threads).attr("add")(thread);
            threads_.append(thread);
        }
        WithoutGil waiting;
        while (!state_->wait_for_arrivals(count()) && waiting.interruptions() == 0) continue;
        waiting.end();
        Py_CLEAR(state_->start);
        waiting.raise();
        if (PyObject* const error = std::exchange(state_->start_error, nullptr); error != nullptr) {
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
            Py_DECREF(error);
            throw py::error_already_set();
        }
    }
    void refuse_other_processes() const {
        if (state_->from_another_process()) {
            throw std::runtime_error("this worker pool belongs to the parent process: it was created before the fork");
        }
    }

    Shared state_;
    py::list threads_;
};

}  // namespace

void bind_worker_pool(py::module_& m) {
    cancelled_error = PyErr_NewExceptionWithDoc(
        "esper._runtime.Cancelled", "A task was skipped because its run was cancelled.", PyExc_RuntimeError, nullptr);
    if (cancelled_error == nullptr) throw py::error_already_set();
    m.attr("Cancelled") = py::handle(cancelled_error);
    all_threads = py::module_::import("weakref").attr("WeakSet")().release().ptr();
    py::module_::import("atexit").attr("register")(py::cpp_function(&close_all));

    py::class_<WorkerPool>(m, "WorkerPool", R"(Persistent threads, by default one per physical core.

count: number of threads; 0 means one per physical core.
start: called once on each thread with the worker's number; the constructor raises its exceptions.
pin: keep each worker on a physical core of its own; with more workers than cores, none is pinned.
name: prefix of the threads' names, before their numbers.)")
        .def(py::init<int, const py::object&, bool, const std::string&>(), py::arg("count") = 0,
             py::arg("start") = py::none(), py::arg("pin") = true, py::arg("name") = "worker")
        .def("run", &WorkerPool::run, py::arg("tasks"), py::arg("costs"),
             R"(Run each task once on one worker, in order of descending cost, and wait for all of them.

Returns (exception or None, seconds) for each task, in the order given; tasks that a cancellation skipped have
Cancelled. Concurrent calls take turns. A signal handler that raises (Ctrl-C) cancels: running tasks finish, then its
exception is raised; a second one is raised at once, and running tasks finish by themselves.
Raises RuntimeError for a closed pool, and in a task of the same pool.)")
        .def("cancel", &WorkerPool::cancel,
             "Start no more tasks of the current run, and set `cancelled` for running ones. From any thread.")
        .def_property_readonly("cancelled", &WorkerPool::cancelled, "Whether the current run was cancelled.")
        .def_property_readonly("cancelled_address", &WorkerPool::cancelled_address,
                               "Where the bool `cancelled` lies in memory, for operators; valid while the pool lives.")
        .def("close", &WorkerPool::close, "Cancel, wait for running tasks and end the threads; may be called again.")
        .def_property_readonly("closed", &WorkerPool::closed, "Whether `close` was called.")
        .def_property_readonly("count", &WorkerPool::count, "Number of workers.")
        .def_property_readonly("cpus", &WorkerPool::cpus,
                               "The CPUs that each worker is pinned to; empty for a worker that the system places.");
}

}  // namespace esper::runtime
