// Releasing the GIL and taking it back, also while signals arrive or the interpreter ends.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace esper::runtime {

// Takes the GIL back. If the interpreter is ending, a daemon thread sleeps here until the process ends, as in Python
// 3.14; earlier versions unwind the thread's stack, and destructors would touch Python without the GIL.
inline void enter_python(PyThreadState* state) {
#if defined(__GLIBCXX__)
    try {
        PyEval_RestoreThread(state);
    } catch (const abi::__forced_unwind&) {
        for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
#else
    PyEval_RestoreThread(state);
#endif
}

// Clears the exception that is set and returns it, with its traceback, as a new reference.
inline PyObject* take_exception() {
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != nullptr) PyException_SetTraceback(value, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return value;
#endif
}

// A scope without the GIL in which Python's signal handlers, such as that of Ctrl-C, still run. Nothing may be thrown
// in it: a thread that is unwinding its stack cannot be put to sleep as above.
class WithoutGil {
 public:
    static constexpr std::chrono::milliseconds kPatience{50};

    WithoutGil() : state_(PyEval_SaveThread()), next_look_(Clock::now() + kPatience) {}
    ~WithoutGil() noexcept(false) { end(); }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

    // Runs the handlers of pending signals, at most once in kPatience and only on the main thread. Returns the number
    // of handlers that have raised so far.
    int interruptions() {
        const auto now = Clock::now();
        if (now < next_look_) return raised_;
        next_look_ = now + kPatience;
        enter_python(state_);
        if (PyErr_CheckSignals() != 0) {
            ++raised_;
            pybind11::error_already_set error;
            if (!first_) first_.emplace(error);
        }
        state_ = PyEval_SaveThread();
        return raised_;
    }

    // Takes the GIL back; a second call does nothing.
    void end() {
        if (PyThreadState* const state = std::exchange(state_, nullptr); state != nullptr) enter_python(state);
    }

    // Raises what the first of those handlers raised; call it after end().
    void raise() {
        if (first_) throw pybind11::error_already_set(*first_);
    }

 private:
    using Clock = std::chrono::steady_clock;

    PyThreadState* state_;
    Clock::time_point next_look_;
    std::optional<pybind11::error_already_set> first_;
    int raised_ = 0;
};

}  // namespace esper::runtime
