// The kernels of cross_entropy for what every machine has.
#define ESPER_TARGET
#define ESPER_WIDE_BYTES 16
#define ESPER_KERNELS kPlainKernels
#include "cross_entropy_rows.h"
