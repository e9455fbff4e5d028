// Graphs that were captured, and their launches.
#include "state.h"

using namespace rehearsal;

extern "C" {

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
    Lock lock(state().mutex);
    const auto found = state().graphs.find(graph);
    if (found == state().graphs.end()) return fail(cudaErrorInvalidValue, "cudaGraphGetNodes");
    *count = found->second->nodes.size();
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
    Lock lock(state().mutex);
    if (prohibited("cudaGraphInstantiate")) {
        return fail(cudaErrorStreamCaptureUnsupported, "cudaGraphInstantiate is not permitted in a capture");
    }
    const auto found = state().graphs.find(graph);
    if (found == state().graphs.end()) return fail(cudaErrorInvalidValue, "cudaGraphInstantiate of a destroyed graph");
    static std::uintptr_t handles = 0;  // never the same twice, so that a stale handle is recognised
    *executable = reinterpret_cast<cudaGraphExec_t>(handles += 16);
    state().executables[*executable] = found->second;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    Lock lock(state().mutex);
    return state().graphs.erase(graph) == 1 ? cudaSuccess : fail(cudaErrorInvalidValue, "cudaGraphDestroy");
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    Lock lock(state().mutex);
    if (prohibited("cudaGraphExecDestroy")) {
        return fail(cudaErrorStreamCaptureUnsupported, "cudaGraphExecDestroy is not permitted in a capture");
    }
    return state().executables.erase(executable) == 1 ? cudaSuccess
                                                      : fail(cudaErrorInvalidValue, "cudaGraphExecDestroy");
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
    Lock lock(state().mutex);
    const auto found = state().executables.find(executable);
    if (found == state().executables.end()) {
        complain("a graph is launched that was destroyed or never made");
        return fail(cudaErrorInvalidValue, "cudaGraphLaunch of a graph that does not exist");
    }
    Stream* const stream = find_stream(handle);
    if (stream == nullptr) return fail(cudaErrorInvalidResourceHandle, "cudaGraphLaunch");
    if (stream->capture != nullptr) {
        break_capture(*stream->capture, "a graph within a graph is not modelled");
        return fail(cudaErrorStreamCaptureUnsupported, "cudaGraphLaunch on a stream that is being captured");
    }
    const size_t count = found->second->nodes.size();
    auto launch = std::make_shared<GraphLaunch>(GraphLaunch{found->second, std::vector<bool>(count, false), count});
    stream->queue.push_back({.launch = std::move(launch)});
    ++stream->queued;
    ++state().counts["graph launches"];
    return cudaSuccess;
}

}  // extern "C"
