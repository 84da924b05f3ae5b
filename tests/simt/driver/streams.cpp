// Streams, events and graphs. A stream is as late as it is allowed to be: what it is given runs when the host waits for
// it. So a test fails where the host reads too early, or overwrites what a copy has yet to read.

#include <cstdint>
#include <cstdio>
#include <deque>
#include <memory>
#include <vector>

#include "driver.h"

namespace {

using standin::Work;

struct Graph {
    std::vector<Work> works;
};

struct Operation {
    Work work;
    bool done = false;
};

struct Stream {
    std::deque<std::shared_ptr<Operation>> pending;
    std::unique_ptr<Graph> capture;  // set while what is given is captured
    unsigned flags = CU_STREAM_DEFAULT;
};

struct Event {
    Stream* stream = nullptr;
    std::shared_ptr<Operation> recorded;
};

std::vector<Stream*> streams;
bool failed = false;

Stream& default_stream() {
    static Stream* stream = streams.emplace_back(new Stream);
    return *stream;
}

Stream& of(CUstream handle) {
    // 0, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD name the default stream.
    return reinterpret_cast<uintptr_t>(handle) <= 2 ? default_stream() : *reinterpret_cast<Stream*>(handle);
}

void run_next(Stream& stream) {
    auto operation = stream.pending.front();
    stream.pending.pop_front();
    operation->work();
    operation->done = true;
}

void run_until_done(Stream& stream, const Operation& operation) {
    while (!operation.done) run_next(stream);
}

CUresult status() { return failed ? CUDA_ERROR_LAUNCH_FAILED : CUDA_SUCCESS; }

}  // namespace

namespace standin {

CUresult give(CUstream handle, Work work) {
    Stream& stream = of(handle);
    if (stream.capture) {
        stream.capture->works.push_back(std::move(work));
    } else {
        stream.pending.push_back(std::make_shared<Operation>(Operation{std::move(work)}));
    }
    return status();
}

CUresult finish(CUstream handle) {
    Stream& stream = of(handle);
    if (stream.capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    while (!stream.pending.empty()) run_next(stream);
    return status();
}

CUresult finish_all() {
    for (Stream* stream : streams) {
        if (stream->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    for (Stream* stream : streams) {
        while (!stream->pending.empty()) run_next(*stream);
    }
    return status();
}

void fail(const char* message) {
    std::fprintf(stderr, "stand-in driver: %s\n", message);
    failed = true;
}

}  // namespace standin

extern "C" {

// --- streams ---

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
    LOG_CALL_IN_CONTEXT();
    *stream = reinterpret_cast<CUstream>(streams.emplace_back(new Stream));
    of(*stream).flags = flags;
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream handle) {
    LOG_CALL();
    Stream* stream = &of(handle);
    while (!stream->pending.empty()) run_next(*stream);
    for (auto place = streams.begin(); place != streams.end(); ++place) {
        if (*place == stream) {
            streams.erase(place);
            break;
        }
    }
    delete stream;
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream stream) {
    LOG_CALL_IN_CONTEXT();
    return standin::finish(stream);
}
CUresult cuCtxSynchronize() {
    LOG_CALL_IN_CONTEXT();
    return standin::finish_all();
}
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetFlags(CUstream stream, unsigned* flags) {
    *flags = of(stream).flags;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetPriority(CUstream, int* priority) {
    *priority = 0;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetDevice(CUstream, CUdevice* device) {
    *device = 0;
    return CUDA_SUCCESS;
}
CUresult cuStreamGetCtx(CUstream, CUcontext* context) { return cuCtxGetCurrent(context); }

// --- events ---

CUresult cuEventCreate(CUevent* event, unsigned) {
    LOG_CALL_IN_CONTEXT();
    *event = reinterpret_cast<CUevent>(new Event);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
    LOG_CALL();
    delete reinterpret_cast<Event*>(event);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent handle, CUstream stream) {
    LOG_CALL_IN_CONTEXT();
    if (of(stream).capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    CUresult result = standin::give(stream, [] {});
    *reinterpret_cast<Event*>(handle) = Event{&of(stream), of(stream).pending.back()};
    return result;
}

CUresult cuEventQuery(CUevent handle) {
    LOG_CALL();
    const auto& recorded = reinterpret_cast<Event*>(handle)->recorded;
    return !recorded || recorded->done ? status() : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent handle) {
    LOG_CALL();
    Event* event = reinterpret_cast<Event*>(handle);
    if (event->recorded) run_until_done(*event->stream, *event->recorded);
    return status();
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent handle, unsigned) {
    LOG_CALL();
    Event event = *reinterpret_cast<Event*>(handle);
    if (!event.recorded) return CUDA_SUCCESS;
    return standin::give(stream, [event] { run_until_done(*event.stream, *event.recorded); });
}

// --- graphs: what one stream captured, in its order ---

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
    LOG_CALL();
    of(stream).capture = std::make_unique<Graph>();
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    LOG_CALL();
    *graph = reinterpret_cast<CUgraph>(of(stream).capture.release());
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    LOG_CALL();
    *status = of(stream).capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                   const CUgraphNode**, const CUgraphEdgeData**, size_t*) {
    LOG_CALL();
    Graph* capture = of(stream).capture.get();
    *status = capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    if (id) *id = reinterpret_cast<uintptr_t>(capture);
    if (graph) *graph = reinterpret_cast<CUgraph>(capture);
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithParams(CUgraphExec* executable, CUgraph graph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS* parameters) {
    LOG_CALL();
    *executable = reinterpret_cast<CUgraphExec>(new Graph(*reinterpret_cast<Graph*>(graph)));
    parameters->result_out = CUDA_GRAPH_INSTANTIATE_SUCCESS;
    return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
    LOG_CALL();
    for (const Work& work : reinterpret_cast<Graph*>(executable)->works) standin::give(stream, work);
    return status();
}

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode*, size_t* count) {
    LOG_CALL();
    *count = reinterpret_cast<Graph*>(graph)->works.size();
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
    LOG_CALL();
    delete reinterpret_cast<Graph*>(graph);
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec executable) {
    LOG_CALL();
    delete reinterpret_cast<Graph*>(executable);
    return CUDA_SUCCESS;
}

// What a graph keeps alive for cuda.core is kept for ever.
CUresult cuUserObjectCreate(CUuserObject* object, void* value, CUhostFn, unsigned, unsigned) {
    *object = static_cast<CUuserObject>(value);
    return CUDA_SUCCESS;
}

CUresult cuUserObjectRelease(CUuserObject, unsigned) { return CUDA_SUCCESS; }
CUresult cuGraphRetainUserObject(CUgraph, CUuserObject, unsigned, unsigned) { return CUDA_SUCCESS; }
CUresult cuGraphReleaseUserObject(CUgraph, CUuserObject, unsigned) { return CUDA_SUCCESS; }

}  // extern "C"
