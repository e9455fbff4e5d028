#include "interpreter.h"

#include <thread>

namespace py = pybind11;

namespace esper::host {

namespace {

bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
}

}  // namespace

void enter_python(PyThreadState* state) {
    while (interpreter_ends()) std::this_thread::sleep_for(std::chrono::hours(1));
    PyEval_RestoreThread(state);
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

Outside::Outside() : state_(PyEval_SaveThread()), next_look_(std::chrono::steady_clock::now() + kPatience) {}

Outside::~Outside() noexcept(false) {
    come_back();
}

int Outside::interruptions() {
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

void Outside::come_back() {
    if (state_ == nullptr) return;
    PyThreadState* const state = state_;
    state_ = nullptr;
    enter_python(state);
}

void Outside::raise() {
    if (first_) throw py::error_already_set(*first_);
}

}  // namespace esper::host
