// Fibers: functions with stacks of their own that take turns on one OS thread.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if defined(EMULATED_SANITIZERS)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__) && !defined(EMULATED_UCONTEXT)
// swapcontext() makes a system call each time; this saves what the ABI wants saved and nothing else.
extern "C" void emulated_switch(void** save, void* load);
asm(R"(
.text
.type emulated_switch, @function
emulated_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulated_switch, .-emulated_switch
)");

namespace emulated {

// A point to continue from: the stack pointer above six saved registers and a return address.
struct Context {
    void* top = nullptr;

    void prepare(unsigned char* stack, size_t bytes, void (*entry)()) {
        void** place = reinterpret_cast<void**>(stack + bytes) - 2;  // as if called: 8 past a multiple of 16
        *place = reinterpret_cast<void*>(entry);
        top = place - 6;
    }
    static void swap(Context& from, const Context& to) { emulated_switch(&from.top, to.top); }
};

}  // namespace emulated
#else
#include <ucontext.h>

namespace emulated {

struct Context {
    ucontext_t saved;

    void prepare(unsigned char* stack, size_t bytes, void (*entry)()) {
        getcontext(&saved);
        saved.uc_stack.ss_sp = stack;
        saved.uc_stack.ss_size = bytes;
        saved.uc_link = nullptr;
        makecontext(&saved, entry, 0);
    }
    static void swap(Context& from, const Context& to) { swapcontext(&from.saved, &to.saved); }
};

}  // namespace emulated
#endif

namespace emulated {

constexpr size_t kStack = 128 * 1024;
constexpr size_t kPage = 4096;

class Fiber {
 public:
    Fiber() {
        void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        mprotect(memory, kPage, PROT_NONE);  // below the stack, so that an overflow is a fault
        stack_ = static_cast<unsigned char*>(memory);
    }
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;
    ~Fiber() { munmap(stack_, kStack); }

    // The next resume() calls `entry` on the fiber's stack. Stacks of other colours start in other lines of a cache.
    void start(void (*entry)(), size_t colour) {
#if defined(EMULATED_SANITIZERS)
        if (abandoned_) __asan_unpoison_memory_region(stack_ + kPage, kStack - kPage);
#endif
        abandoned_ = false;
        context_.prepare(stack_ + kPage, kStack - kPage - colour % 64 * 192, entry);
    }

    // From the scheduler: returns when the fiber suspends.
    void resume() {
#if defined(EMULATED_SANITIZERS)
        void* fake = nullptr;
        __sanitizer_start_switch_fiber(&fake, stack_ + kPage, kStack - kPage);
#endif
        Context::swap(scheduler, context_);
#if defined(EMULATED_SANITIZERS)
        __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    }

    // Called first on the fiber's own stack.
    static void entered() {
#if defined(EMULATED_SANITIZERS)
        __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
#endif
    }

    // From the fiber, to the scheduler: returns at the next resume(), or never if it is `for_good`.
    void suspend(bool for_good = false) {
        abandoned_ = for_good;
#if defined(EMULATED_SANITIZERS)
        void* fake = nullptr;
        __sanitizer_start_switch_fiber(for_good ? nullptr : &fake, scheduler_stack, scheduler_bytes);
#endif
        Context::swap(context_, scheduler);
#if defined(EMULATED_SANITIZERS)
        __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_bytes);
#endif
    }

 private:
    static inline Context scheduler;
#if defined(EMULATED_SANITIZERS)
    static inline const void* scheduler_stack = nullptr;
    static inline size_t scheduler_bytes = 0;
#endif
    unsigned char* stack_;
    Context context_;
    bool abandoned_ = false;
};

}  // namespace emulated
