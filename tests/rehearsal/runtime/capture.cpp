// Stream capture and its rules, as the CUDA programming guide has them under "prohibited and unhandled operations".
#include <algorithm>

#include "state.h"

namespace rehearsal {

namespace {

std::uint64_t captures = 0;
thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

// Whether a potentially unsafe call of this thread is at odds with the capture.
bool forbids(const Capture& capture) {
    if (thread_mode == cudaStreamCaptureModeRelaxed || capture.mode == cudaStreamCaptureModeRelaxed) return false;
    if (capture.thread == std::this_thread::get_id()) return true;
    return capture.mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
}

}  // namespace

bool prohibited(const char* call) {
    bool found = false;
    for (Stream* stream : all_streams()) {
        if (stream->capture == nullptr || !forbids(*stream->capture)) continue;
        break_capture(*stream->capture, std::string(call) + " while a capture forbids it");
        found = true;
    }
    return found;
}

void break_capture(Capture& capture, const std::string& why) {
    if (capture.broken) return;
    capture.broken = true;
    ++state().counts["broken captures"];
    fail(cudaErrorStreamCaptureInvalidated, why);
}

size_t add_node(Stream& stream, Action run) {
    auto& nodes = stream.capture->graph->nodes;
    nodes.push_back({std::move(run), std::move(stream.frontier)});
    stream.frontier = {nodes.size() - 1};
    return nodes.size() - 1;
}

}  // namespace rehearsal

using namespace rehearsal;

namespace {

// Whether there are nodes that none comes after and that are not in `joined`: work of forked streams that never joined.
bool has_loose_ends(const Graph& graph, const std::vector<size_t>& joined) {
    std::vector<bool> followed(graph.nodes.size(), false);
    for (const Node& node : graph.nodes) {
        for (const size_t before : node.after) followed[before] = true;
    }
    for (const size_t node : joined) followed[node] = true;
    return std::find(followed.begin(), followed.end(), false) != followed.end();
}

void leave_capture(const std::shared_ptr<Capture>& capture) {
    for (Stream* stream : all_streams()) {
        if (stream->capture != capture) continue;
        stream->capture.reset();
        stream->frontier.clear();
    }
}

}  // namespace

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
    std::swap(*mode, thread_mode);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    Lock lock(state().mutex);
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle, "cudaStreamBeginCapture");
    if (state().streams.count(handle) == 0) {
        return fail(cudaErrorStreamCaptureUnsupported, "the default stream cannot be captured");
    }
    if (stream->capture != nullptr) return fail(cudaErrorIllegalState, "the stream is being captured already");
    stream->capture =
        std::make_shared<Capture>(Capture{.id = ++captures, .mode = mode, .thread = std::this_thread::get_id()});
    ++state().counts["captures"];
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    Lock lock(state().mutex);
    *graph = nullptr;
    Stream* const stream = find_stream(handle);
    if (stream == nullptr || stream->capture == nullptr) {
        return fail(cudaErrorIllegalState, "cudaStreamEndCapture for a stream that is not being captured");
    }
    const std::shared_ptr<Capture> capture = stream->capture;
    if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
        return fail(cudaErrorStreamCaptureWrongThread, "cudaStreamEndCapture");
    }
    const bool loose = has_loose_ends(*capture->graph, stream->frontier);
    leave_capture(capture);
    capture->over = true;
    if (capture->broken) return fail(cudaErrorStreamCaptureInvalidated, "the end of a capture that was broken");
    if (loose) return fail(cudaErrorStreamCaptureUnjoined, "a stream that was forked in a capture was not joined");
    *graph = reinterpret_cast<cudaGraph_t>(capture->graph.get());
    state().graphs[*graph] = capture->graph;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* count) {
    Lock lock(state().mutex);
    touch_context(current_device(), "cudaStreamGetCaptureInfo");
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle, "cudaStreamGetCaptureInfo");
    const Capture* const capture = stream->capture.get();
    *status = capture == nullptr ? cudaStreamCaptureStatusNone
              : capture->broken  ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    if (id != nullptr) *id = capture == nullptr ? 0 : capture->id;
    if (graph != nullptr) *graph = capture == nullptr ? nullptr : reinterpret_cast<cudaGraph_t>(capture->graph.get());
    if (dependencies != nullptr) *dependencies = nullptr;
    if (edges != nullptr) *edges = nullptr;
    if (count != nullptr) *count = 0;
    return cudaSuccess;
}

}  // extern "C"
