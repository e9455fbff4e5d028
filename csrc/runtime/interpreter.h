// Leaving Python for a while, and coming back.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <optional>

namespace esper::host {

// Take the GIL back. A daemon thread that comes when the interpreter ends sleeps here until the process does, as Python
// 3.14 has it. Earlier ones end the thread by unwinding its stack: destructors would touch Python without the GIL.
void enter_python(PyThreadState* state);

// The exception that is set, with its traceback, as an object that the caller owns; clears it.
PyObject* take_exception();

// A time without the GIL in which Ctrl-C, and whatever else has a handler in Python, still acts. Nothing should be
// thrown in it: a thread that has an exception under way cannot be put to sleep as above.
class Outside {
 public:
    static constexpr std::chrono::milliseconds kPatience{50};

    Outside();
    ~Outside() noexcept(false);
    Outside(const Outside&) = delete;
    Outside& operator=(const Outside&) = delete;

    // Run the handlers of the signals that came, if the last look was kPatience ago. How many handlers raised so far.
    // Only the main thread runs any.
    int interruptions();

    // Take the GIL. A second call does nothing.
    void come_back();

    // Raise what the first of those handlers raised. After come_back.
    void raise();

 private:
    PyThreadState* state_;
    std::chrono::steady_clock::time_point next_look_;
    std::optional<pybind11::error_already_set> first_;
    int raised_ = 0;
};

}  // namespace esper::host
