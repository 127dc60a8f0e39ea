/* One translation unit per instruction set: every kernel, compiled for it. */
#include "scan.c"
#include "step.c"
