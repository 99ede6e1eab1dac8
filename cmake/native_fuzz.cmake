# The fuzzer of parsers, for `make fuzz`: gcc instruments, tests/native/fuzz drives. Fuzzed code reports its
# branches and comparisons; the driver isn't instrumented, or it would explore itself.
set(GMETA_FUZZ_OPTIMIZE -O1 CACHE STRING "-O0 compiles in half the time, and runs slower")
set(fuzz_sanitizers -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer ${GMETA_FUZZ_OPTIMIZE} -UNDEBUG)
add_library(fuzz_targets OBJECT
  tests/native/fuzz/records_target.cc tests/native/fuzz/ranges_target.cc tests/native/fuzz/stripes_target.cc)
target_compile_options(fuzz_targets PRIVATE ${fuzz_sanitizers} -fsanitize-coverage=trace-pc,trace-cmp)
add_library(fuzz_coverage OBJECT tests/native/fuzz/coverage.cc)
target_compile_options(fuzz_coverage PRIVATE -O2)
add_executable(fuzz tests/native/fuzz/driver.cc $<TARGET_OBJECTS:fuzz_targets> $<TARGET_OBJECTS:fuzz_coverage>)
target_compile_options(fuzz PRIVATE ${fuzz_sanitizers})
target_link_options(fuzz PRIVATE -fsanitize=address,undefined)
target_link_libraries(fuzz PRIVATE Threads::Threads)
