// machine.cu: the machine that executes PTX (machine.h) as an object that a program of
// nvcc's is linked with. The host's C++ compiler compiles it.
#include "test/ptx/runtime.h"
