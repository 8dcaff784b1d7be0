// entry.c: the entry point of libFuzzer. The Makefile includes one fuzz_NAME.h in front
// of it and defines TARGET as the name of its function.
#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    TARGET(data, size);
    return 0;
}
