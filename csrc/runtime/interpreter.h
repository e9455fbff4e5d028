// Releasing the GIL and taking it back, also while signals arrive or the interpreter ends.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <optional>

namespace esper::runtime {

// Takes the GIL back. If the interpreter is ending, a daemon thread sleeps here until the process ends, as in Python
// 3.14; earlier versions unwind the thread's stack, and destructors would touch Python without the GIL.
void enter_python(PyThreadState* state);

// Clears the exception that is set and returns it, with its traceback, as a new reference.
PyObject* take_exception();

// A scope without the GIL in which Python's signal handlers, such as that of Ctrl-C, still run. Nothing may be thrown
// in it: a thread that is unwinding its stack cannot be put to sleep as above.
class WithoutGil {
 public:
    static constexpr std::chrono::milliseconds kPatience{50};

    WithoutGil();
    ~WithoutGil() noexcept(false);
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

    // Runs the handlers of pending signals, at most once in kPatience and only on the main thread. Returns the number
    // of handlers that have raised so far.
    int interruptions();

    // Takes the GIL back; a second call does nothing.
    void end();

    // Raises what the first of those handlers raised; call it after end().
    void raise();

 private:
    PyThreadState* state_;
    std::chrono::steady_clock::time_point next_look_;
    std::optional<pybind11::error_already_set> first_;
    int raised_ = 0;
};

}  // namespace esper::runtime
