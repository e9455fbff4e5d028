/* A CUDA runtime without a device, for tests of what calls one. It writes down its calls and fails where it is told to.
   Graphs are any numbers; streams are numbered from 1. Built without cudaGraphLaunch by -DOLD. */
#include <stdint.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_DEVICE = 101, NOT_READY = 600, DEVICES = 2, ROOM = 100000 };

struct launch {
    intptr_t graph, stream;
    int device;
};
struct call {
    int name, device;
    intptr_t first, second;
};

/* What tests read and set; see fake_cudart.py. */
struct launch fake_launches[ROOM];
struct call fake_calls[ROOM];
int fake_launch_count, fake_call_count, fake_last_error;
intptr_t fake_bad_graph, fake_bad_stream;
int fake_bad_step, fake_code;
int fake_driver_version = 13000;
int fake_context_bits; /* bit d: device d has a context */
int fake_delay_us;
volatile int fake_gate_closed, fake_somebody_waits;
int fake_busy_queries;

static __thread int device;
static int handles, bad_graph_launches;

static int remember(int code) {
    if (code != SUCCESS) fake_last_error = code;
    return code;
}

static void note(int name, intptr_t first, intptr_t second) {
    fake_calls[fake_call_count++] = (struct call){name, device, first, second};
}

int cudaDriverGetVersion(int *version) {
    *version = fake_driver_version;
    return SUCCESS;
}

int cudaGetDevice(int *current) {
    *current = device;
    return SUCCESS;
}

/* As since CUDA 12: it makes a context, also for the device that is current. */
int cudaSetDevice(int wanted) {
    if (wanted < 0 || wanted >= DEVICES) return remember(INVALID_DEVICE);
    device = wanted;
    fake_context_bits |= 1 << wanted;
    return SUCCESS;
}

/* Of the driver, which is part of this library. */
int cuDevicePrimaryCtxGetState(int asked, unsigned *flags, int *active) {
    *flags = 0;
    *active = fake_context_bits >> asked & 1;
    return SUCCESS;
}

int cudaGetLastError(void) {
    int code = fake_last_error;
    fake_last_error = SUCCESS;
    return code;
}

const char *cudaGetErrorString(int code) { return code == INVALID_DEVICE ? "invalid device ordinal" : "made to fail"; }

int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    *stream = (void *)(intptr_t)++handles;
    fake_context_bits |= 1 << device;
    note('S', handles, flags);
    return SUCCESS;
}

int cudaStreamQuery(void *stream) {
    fake_somebody_waits = 1;
    if (fake_busy_queries > 0) {
        --fake_busy_queries;
        return remember(NOT_READY);
    }
    if (fake_gate_closed) return remember(NOT_READY);
    return remember((intptr_t)stream == fake_bad_stream ? fake_code : SUCCESS);
}

#ifndef OLD
int cudaGraphLaunch(void *graph, void *stream) {
    fake_somebody_waits = 1;
    for (int ms = 0; fake_gate_closed; ++ms) { /* a test opens it; the others fail soon enough */
        if (ms == 20000) return remember(INVALID_VALUE);
        usleep(1000);
    }
    if (fake_delay_us > 0) usleep(fake_delay_us);
    if ((intptr_t)graph == fake_bad_graph && bad_graph_launches++ == fake_bad_step) return remember(fake_code);
    fake_launches[fake_launch_count++] = (struct launch){(intptr_t)graph, (intptr_t)stream, device};
    return SUCCESS;
}
#endif
