// Reports of the compiler's checks of alignment and of array bounds, as errors of the thread that ran into them.
//
// With -fsanitize=alignment,bounds the compiler calls these functions, which otherwise come from libubsan and print or
// end the process. The structures are those of compiler-rt's ubsan_handlers.h.
#if !defined(EMULATED_SANITIZERS)
#include <string>

#include "cuda_runtime.h"

namespace {

struct SourceLocation {
    const char* file;
    uint32_t line;
    uint32_t column;
};

struct TypeDescriptor {
    uint16_t kind;
    uint16_t info;
    char name[1];
};

struct TypeMismatch {
    SourceLocation where;
    const TypeDescriptor* type;
    unsigned char log_alignment;
    unsigned char check;
};

struct OutOfBounds {
    SourceLocation where;
    const TypeDescriptor* array;
    const TypeDescriptor* index;
};

std::string text_of(const SourceLocation& where) {
    return std::string(where.file) + ":" + std::to_string(where.line);
}

}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1(const TypeMismatch* found, uintptr_t) {
    emulated::fail("an address that is not aligned for " + std::string(found->type->name) + ", at " +
                   text_of(found->where));
}

extern "C" void __ubsan_handle_out_of_bounds(const OutOfBounds* found, uintptr_t index) {
    emulated::fail("index " + std::to_string(index) + " is outside of an array of type " + found->array->name +
                   ", at " + text_of(found->where));
}
#endif
