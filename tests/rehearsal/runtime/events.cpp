// Events: a record has a number, and whoever waits, waits for the record that was the newest at the call.
#include "state.h"

using namespace rehearsal;

namespace {

std::shared_ptr<Event> find_event(cudaEvent_t handle) {
    const auto found = state().events.find(handle);
    return found == state().events.end() ? nullptr : found->second;
}

cudaError_t no_event(const char* call) {
    return fail(cudaErrorInvalidResourceHandle, std::string(call) + " for an event that does not exist");
}

// Whether the state of the event may be asked for; else the error.
cudaError_t may_ask(const Event& event, const char* call) {
    if (event.capture != nullptr) {
        break_capture(*event.capture, std::string(call) + " for an event that was captured");
        return fail(cudaErrorCapturedEvent, std::string(call) + " for an event that was captured");
    }
    if (prohibited(call)) {
        return fail(cudaErrorStreamCaptureUnsupported, std::string(call) + " is not permitted in a capture");
    }
    return cudaSuccess;
}

}  // namespace

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned) {
    Lock lock(state().mutex);
    touch_context(current_device(), "cudaEventCreateWithFlags");
    auto event = std::make_shared<Event>();
    event->device = current_device();
    *handle = reinterpret_cast<cudaEvent_t>(event.get());
    state().events[*handle] = std::move(event);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) {
    return cudaEventCreateWithFlags(handle, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    Lock lock(state().mutex);
    return state().events.erase(handle) == 1 ? cudaSuccess : no_event("cudaEventDestroy");
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    Lock lock(state().mutex);
    const auto event = find_event(handle);
    Stream* const stream = find_stream(stream_handle);
    if (event == nullptr || stream == nullptr) return no_event("cudaEventRecord");
    if (event->device != stream->device) {
        return fail(cudaErrorInvalidResourceHandle, "an event is recorded on a stream of another device");
    }
    event->capture = stream->capture;
    if (stream->capture != nullptr) {
        if (stream->capture->broken) return fail(cudaErrorStreamCaptureInvalidated, "cudaEventRecord");
        event->nodes = stream->frontier;
        return cudaSuccess;
    }
    stream->queue.push_back({.record = event, .number = ++event->recorded});
    ++stream->queued;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
    if (flags != cudaEventRecordDefault) return fail(cudaErrorNotSupported, "an external record is not modelled");
    return cudaEventRecord(handle, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    Lock lock(state().mutex);
    const auto event = find_event(handle);
    if (event == nullptr) return no_event("cudaEventQuery");
    if (const cudaError_t code = may_ask(*event, "cudaEventQuery"); code != cudaSuccess) return code;
    step_any(lock);
    return event->passed >= event->recorded ? cudaSuccess : fail(cudaErrorNotReady, "");
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    Lock lock(state().mutex);
    const auto event = find_event(handle);
    if (event == nullptr) return no_event("cudaEventSynchronize");
    if (const cudaError_t code = may_ask(*event, "cudaEventSynchronize"); code != cudaSuccess) return code;
    ++state().counts["waits"];
    const std::uint64_t target = event->recorded;
    work_until([&] { return event->passed >= target; }, lock);
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start_handle, cudaEvent_t end_handle) {
    Lock lock(state().mutex);
    const auto start = find_event(start_handle);
    const auto end = find_event(end_handle);
    if (start == nullptr || end == nullptr || start->device != end->device || start->recorded == 0 ||
        end->recorded == 0) {
        return no_event("cudaEventElapsedTime");
    }
    if (start->passed < start->recorded || end->passed < end->recorded) return fail(cudaErrorNotReady, "");
    *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
    return cudaSuccess;
}

}  // extern "C"
