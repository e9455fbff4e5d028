#include "interpreter.h"

#include <thread>

#if defined(__GLIBCXX__)
#include <cxxabi.h>
#endif

namespace py = pybind11;

namespace esper::runtime {

void enter_python(PyThreadState* state) {
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

PyObject* take_exception() {
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

WithoutGil::WithoutGil() : state_(PyEval_SaveThread()), next_look_(std::chrono::steady_clock::now() + kPatience) {}

WithoutGil::~WithoutGil() noexcept(false) {
    end();
}

int WithoutGil::interruptions() {
    const auto now = std::chrono::steady_clock::now();
    if (now < next_look_) return raised_;
    next_look_ = now + kPatience;
    enter_python(state_);
    if (PyErr_CheckSignals() != 0) {
        ++raised_;
        py::error_already_set error;
        if (!first_) first_.emplace(error);
    }
    state_ = PyEval_SaveThread();
    return raised_;
}

void WithoutGil::end() {
    if (state_ == nullptr) return;
    PyThreadState* const state = state_;
    state_ = nullptr;
    enter_python(state);
}

void WithoutGil::raise() {
    if (first_) throw py::error_already_set(*first_);
}

}  // namespace esper::runtime
