// The few functions of libcuda that torch asks for without a kernel of its own making. Contexts are those of the fake
// runtime.
#include <stddef.h>
#include <string.h>

const char* rehearsal_context(int device);

static char contexts[8];

int cuInit(unsigned flags) {
    (void)flags;
    return 0;
}

int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
    *flags = 0;
    *active = strlen(rehearsal_context(device)) > 0;
    return 0;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = &contexts[device];
    return 0;
}

int cuCtxGetCurrent(void** context) {
    *context = &contexts[0];
    return 0;
}

int cuCtxSetCurrent(void* context) {
    (void)context;
    return 0;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
    (void)attribute;
    (void)device;
    *value = 0;
    return 0;
}

int cuGetErrorString(int code, const char** text) {
    (void)code;
    *text = "an error of the fake driver";
    return 0;
}
