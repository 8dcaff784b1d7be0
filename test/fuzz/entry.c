// entry.c: a fuzz target as libFuzzer wants it. The Makefile includes one fuzz_NAME.h and
// says which function TARGET is.
#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    TARGET(data, size);
    return 0;
}
