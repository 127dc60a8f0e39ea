/* One translation unit per instruction set: every kernel, compiled for it. */
#include "scan.c"
#include "hydra.c"
#include "linear.c"
#include "external.c"
