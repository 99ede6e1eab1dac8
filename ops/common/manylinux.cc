// Lets the libraries of a wheel load where glibc is 2.28 and libstdc++ is that of GCC 8, as the tag
// manylinux_2_28 promises. Only wheels are linked with it (cmake/manylinux.cmake).
//
// A linker binds a reference to a function's newest version, and a loader refuses a library that
// requires a version that is missing. Most of these functions only have a newer version because
// libpthread, libdl and librt became parts of libc (glibc 2.34); the old version does the same. So
// each is defined here, hidden, and jumps to the old version. All references within a library bind
// to it, those of static libraries too. The linker drops what a library doesn't use.
//
// A jump passes any arguments on, but is written for x86-64 alone. `auditwheel` checks the outcome
// (tools/dev/build_wheel.py): a function that is missing here costs a wheel its tag.

#include <sys/stat.h>

#include <exception>
#include <new>

#define GMETA_OLD(name, version)                                                      \
  __asm__(".symver gmeta_old_" #name ", " #name "@" version                           \
          "\n.pushsection .text.gmeta_old_" #name                                     \
          ", \"ax\", @progbits"                                                       \
          "\n.globl " #name "\n.hidden " #name "\n.type " #name ", @function\n" #name \
          ":\n  jmp gmeta_old_" #name                                                 \
          "@PLT"                                                                      \
          "\n.size " #name ", . - " #name "\n.popsection")

#define GMETA_OLD_C(name) GMETA_OLD(name, "GLIBC_2.2.5")

// 2.29: without the errors of System V, which -fno-math-errno forgoes anyway.
GMETA_OLD_C(exp);
GMETA_OLD_C(log);
GMETA_OLD_C(pow);

// 2.34: once in libdl.
GMETA_OLD_C(dlclose);
GMETA_OLD_C(dlerror);
GMETA_OLD(dlmopen, "GLIBC_2.3.4");
GMETA_OLD_C(dlopen);
GMETA_OLD_C(dlsym);
GMETA_OLD_C(dlvsym);

// 2.34: once in librt.
GMETA_OLD_C(shm_open);
GMETA_OLD_C(shm_unlink);

// 2.34: once in libpthread.
GMETA_OLD_C(pthread_condattr_setpshared);
GMETA_OLD_C(pthread_create);
GMETA_OLD_C(pthread_detach);
GMETA_OLD_C(pthread_getspecific);
GMETA_OLD_C(pthread_join);
GMETA_OLD_C(pthread_key_create);
GMETA_OLD_C(pthread_key_delete);
GMETA_OLD_C(pthread_kill);
GMETA_OLD_C(pthread_mutex_trylock);
GMETA_OLD_C(pthread_mutexattr_destroy);
GMETA_OLD_C(pthread_mutexattr_init);
GMETA_OLD_C(pthread_mutexattr_setpshared);
GMETA_OLD_C(pthread_mutexattr_settype);
GMETA_OLD_C(pthread_once);
GMETA_OLD_C(pthread_rwlock_destroy);
GMETA_OLD_C(pthread_rwlock_init);
GMETA_OLD_C(pthread_rwlock_rdlock);
GMETA_OLD_C(pthread_rwlock_timedrdlock);
GMETA_OLD_C(pthread_rwlock_timedwrlock);
GMETA_OLD_C(pthread_rwlock_tryrdlock);
GMETA_OLD_C(pthread_rwlock_trywrlock);
GMETA_OLD_C(pthread_rwlock_unlock);
GMETA_OLD_C(pthread_rwlock_wrlock);
GMETA_OLD_C(pthread_rwlockattr_destroy);
GMETA_OLD_C(pthread_rwlockattr_init);
GMETA_OLD_C(pthread_rwlockattr_setpshared);
GMETA_OLD_C(pthread_setspecific);
GMETA_OLD_C(pthread_spin_destroy);
GMETA_OLD_C(pthread_spin_init);
GMETA_OLD_C(pthread_spin_lock);
GMETA_OLD_C(pthread_spin_trylock);
GMETA_OLD_C(pthread_spin_unlock);
GMETA_OLD_C(sem_destroy);
GMETA_OLD_C(sem_init);
GMETA_OLD_C(sem_post);
GMETA_OLD_C(sem_timedwait);
GMETA_OLD_C(sem_trywait);
GMETA_OLD_C(sem_wait);

// GCC 12: it no longer waits for a process with one thread.
GMETA_OLD(_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE, "GLIBCXX_3.4.11");

#define GMETA_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

// 2.33: once a function of each program, around this one; 1 is the layout of x86-64's `stat`.
int __fxstat(int layout, int file, struct stat* found);
GMETA_HIDDEN int fstat(int file, struct stat* found) noexcept { return __fxstat(1, file, found); }

// 2.32: whether there is one thread; libstdc++ then counts references without atomic operations.
GMETA_HIDDEN char __libc_single_threaded = 0;

// GCC 12: copies and the destructor of std::exception_ptr call these two. Older libraries have
// copies and destructor alone.
void gmeta_copy_exception(void* to, const void* from);
void gmeta_drop_exception(void* pointer);
__asm__(".symver gmeta_copy_exception, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver gmeta_drop_exception, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");
GMETA_HIDDEN void gmeta_add_reference(void* pointer) noexcept
    __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
GMETA_HIDDEN void gmeta_release(void** pointer) noexcept
    __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");

void gmeta_add_reference(void* pointer) noexcept {
  void* copy;  // never dropped, so its reference stays
  gmeta_copy_exception(&copy, pointer);
}

void gmeta_release(void** pointer) noexcept {
  gmeta_drop_exception(pointer);
  *pointer = nullptr;
}

}  // extern "C"

namespace std {

// GCC 11.
GMETA_HIDDEN void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
