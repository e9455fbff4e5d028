// Streams: none of them waits for the default stream, and none is shared between devices.
#include <algorithm>

#include "state.h"

namespace rehearsal {

Stream* find_stream(cudaStream_t handle, int device) {
    if (handle == nullptr || handle == cudaStreamLegacy) {
        auto& stream = state().default_stream[device];
        if (stream == nullptr) stream.reset(new Stream{.device = device});
        return stream.get();
    }
    const auto found = state().streams.find(handle);
    return found == state().streams.end() ? nullptr : found->second.get();
}

std::vector<Stream*> all_streams() {
    std::vector<Stream*> streams;
    for (const auto& stream : state().default_stream) {
        if (stream != nullptr) streams.push_back(stream.get());
    }
    for (const auto& [handle, stream] : state().streams) streams.push_back(stream.get());
    return streams;
}

cudaError_t submit(Stream& stream, Action run, const char* call) {
    if (const cudaError_t code = check_capture(stream, call); code != cudaSuccess) return code;
    if (stream.capture != nullptr) {
        add_node(stream, std::move(run));
        return cudaSuccess;
    }
    stream.queue.push_back({.run = std::move(run)});
    ++stream.queued;
    return cudaSuccess;
}

cudaError_t check_capture(const Stream& stream, const char* call) {
    if (stream.capture == nullptr || !stream.capture->broken) return cudaSuccess;
    return fail(cudaErrorStreamCaptureInvalidated, std::string(call) + " in a capture that is broken");
}

}  // namespace rehearsal

using namespace rehearsal;

namespace {

cudaError_t no_stream(const char* call) {
    return fail(cudaErrorInvalidResourceHandle, std::string(call) + " for a stream that does not exist");
}

// What a call that asks for the state of a stream may not do while the stream is captured.
bool asks_capture(Stream& stream, const char* call) {
    if (stream.capture == nullptr) return prohibited(call);
    break_capture(*stream.capture, std::string(call) + " for a stream that is being captured");
    return true;
}

cudaError_t capture_unsupported(const char* call) {
    return fail(cudaErrorStreamCaptureUnsupported, std::string(call) + " is not permitted in a capture");
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags, int) {
    Lock lock(state().mutex);
    touch_context(current_device(), "cudaStreamCreateWithPriority");
    if ((flags & cudaStreamNonBlocking) == 0) {
        complain("a stream that waits for the default stream is not modelled");
        return fail(cudaErrorNotSupported, "cudaStreamCreateWithPriority without cudaStreamNonBlocking");
    }
    std::unique_ptr<Stream> stream(new Stream{.device = current_device()});
    *handle = reinterpret_cast<cudaStream_t>(stream.get());
    state().streams[*handle] = std::move(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) {
    return cudaStreamCreateWithPriority(handle, cudaStreamDefault, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Lock lock(state().mutex);
    Stream* const stream = find_stream(handle);
    if (stream == nullptr || state().streams.count(handle) == 0) return no_stream("cudaStreamDestroy");
    drain(*stream, lock);
    state().streams.erase(handle);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    Lock lock(state().mutex);
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return no_stream("cudaStreamQuery");
    if (asks_capture(*stream, "cudaStreamQuery")) return capture_unsupported("cudaStreamQuery");
    step_any(lock);
    return stream->queue.empty() ? cudaSuccess : fail(cudaErrorNotReady, "");
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    Lock lock(state().mutex);
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return no_stream("cudaStreamSynchronize");
    if (asks_capture(*stream, "cudaStreamSynchronize")) return capture_unsupported("cudaStreamSynchronize");
    ++state().counts["waits"];
    drain(*stream, lock);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
    Lock lock(state().mutex);
    touch_context(current_device(), "cudaDeviceSynchronize");
    bool captured = false;
    for (Stream* stream : all_streams()) {
        if (stream->device != current_device() || stream->capture == nullptr) continue;
        break_capture(*stream->capture, "cudaDeviceSynchronize while a stream of the device is captured");
        captured = true;
    }
    if (captured || prohibited("cudaDeviceSynchronize")) return capture_unsupported("cudaDeviceSynchronize");
    ++state().counts["waits"];
    drain_device(current_device(), lock);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
    Lock lock(state().mutex);
    Stream* const stream = find_stream(handle);
    const auto found = state().events.find(event_handle);
    if (stream == nullptr || found == state().events.end()) return no_stream("cudaStreamWaitEvent");
    const std::shared_ptr<Event>& event = found->second;
    if (event->capture == nullptr && event->recorded == 0) return cudaSuccess;
    if (event->capture != nullptr && stream->capture == nullptr) {
        if (event->capture->over) return fail(cudaErrorCapturedEvent, "a wait for an event of a capture that is over");
        if (state().streams.count(handle) == 0) return capture_unsupported("cudaStreamWaitEvent on the default stream");
        stream->capture = event->capture;  // the stream joins the capture
        stream->frontier.clear();
    }
    if (stream->capture != event->capture) {
        break_capture(*stream->capture, "a captured stream waits for an event of no or of another capture");
        return fail(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent across the border of a capture");
    }
    if (stream->capture != nullptr) {
        stream->frontier.insert(stream->frontier.end(), event->nodes.begin(), event->nodes.end());
        return cudaSuccess;
    }
    stream->queue.push_back({.wait = event, .number = event->recorded});
    ++stream->queued;
    return cudaSuccess;
}

}  // extern "C"
